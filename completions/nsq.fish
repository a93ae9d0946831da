# fish completion for nsq. Rendered by python -m nsqtools.cli.docs: do not edit.

function __nsq_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l program $before[1]
    set -e before[1]
    set -l path nsq
    set -l commands
    set -l command_helps
    set -l options
    set -l option_helps
    set -l arguments
    set -l has_go_flags no
    set -l cluster
    set -l topic
    set -l awaiting
    set -l only_arguments no
    set -l count 1
    set -l given
    set -l found
    set -l spec
    __nsq_describe $path
    for word in $before
        if test -n "$awaiting"
            __nsq_take $awaiting $word
            set awaiting
        else if test $only_arguments = yes; or not string match -qr -- '^-.' $word
            if test -n "$commands"
                set path "$path $word"
                __nsq_describe $path; or return
            else
                __nsq_argument $count
                test "$spec" = @topics; and set topic $word
                set count (math $count + 1)
                test $has_go_flags = yes; and set only_arguments yes
            end
        else if test $word = --
            set only_arguments yes
        else
            __nsq_read_option $word
        end
    end
    if test -n "$awaiting"
        __nsq_find $awaiting
        and __nsq_offer_values '' $current
    else if test $only_arguments = no; and string match -q -- '-*=*' $current
        set -l cut (string split -m 1 = -- $current)
        __nsq_find $cut[1]
        and __nsq_offer_values $cut[1]= $cut[2]
    else if test $only_arguments = no; and string match -q -- '-*' $current
        __nsq_offer_options
    else if test -n "$commands"
        for index in (seq (count $commands))
            printf '%s\t%s\n' $commands[$index] $command_helps[$index]
        end
    else
        __nsq_argument $count
        __nsq_offer_values '' $current
    end
end

# Find the option that is spelled $argv[1]: its number becomes found, what its value is spec.
function __nsq_find --no-scope-shadowing
    set -l wanted $argv[1]
    test $has_go_flags = yes; and set wanted (string replace -r -- '^-+' - $wanted)
    set -l spellings (string replace -r -- '^\*?([^?=]*).*' ',$1,' $options)
    set found (contains -i -- (string match -- "*,$wanted,*" $spellings)[1] $spellings)
    or return 1
    set spec (string split -m 1 -- = $options[$found])[2]
    return 0
end

# Note the option of a word; where its value is the next word, awaiting is its name.
function __nsq_read_option --no-scope-shadowing
    set -l cut (string split -m 1 -- = $argv[1])
    if test $has_go_flags = no; and string match -qr -- '^-[^-]' $argv[1]
        # letters: -v, -qn 10, -tclicks
        set -l rest (string sub -s 2 -- $argv[1])
        while test -n "$rest"
            set -l name -(string sub -l 1 -- $rest)
            set rest (string sub -s 2 -- $rest)
            __nsq_find $name; or return
            set -a given $found
            if string match -q -- '*=*' $options[$found]
                if test -n "$rest"
                    __nsq_take $name $rest
                else
                    set awaiting $name
                end
                return
            end
        end
    else if __nsq_find $cut[1]
        set -a given $found
        if set -q cut[2]
            __nsq_take $cut
        else if string match -qr -- '[^?]=' $options[$found]
            set awaiting $cut[1]
        else
            __nsq_take $cut[1]
        end
    end
end

# Remember a topic, and what says which cluster to ask.
function __nsq_take --no-scope-shadowing
    string match -q -- '*=@topics' $options[$found]
    and set topic (string split -- = $argv[2])[-1]
    switch $argv[1]
        case --nsqd-http-address --lookupd-http-address --nsqd-tcp-address --address-map -P --profile --tls-ca-file --tls-cert --tls-key --tls-min-version --auth-secret-file --tls-pin-sha256 --timeout --allow-announced
            set -a cluster $argv[1] $argv[2]
        case --no-profile --tls-insecure --auth-requires-tls --lookupd-authorization
            set -a cluster $argv[1]
    end
end

# What the argument with the number $argv[1] is: spec. The last may be repeated.
function __nsq_argument --no-scope-shadowing
    set spec
    if set -q arguments[$argv[1]]
        set spec (string replace -r -- '^\*' '' $arguments[$argv[1]])
    else if string match -q -- '\**' $arguments[-1]
        set spec (string replace -r -- '^\*' '' $arguments[-1])
    end
end

# An option that was given is offered again only if it may be repeated.
function __nsq_offer_options --no-scope-shadowing
    set -l dash ''
    test $has_go_flags = yes; and string match -q -- '--*' $current; and set dash -
    for index in (seq (count $options))
        contains -- $index $given; and not string match -q -- '\**' $options[$index]; and continue
        set -l names (string replace -r -- '^\*?([^?=]*).*' '$1' $options[$index] | string split ,)
        for name in $names
            printf '%s\t%s\n' $dash$name $option_helps[$index]
        end
    end
end

# Offer values like $argv[2], as spec says, each prefixed with $argv[1].
function __nsq_offer_values --no-scope-shadowing
    switch "$spec"
        case ''
        case @file
            # the files that fish offers to a command it knows nothing of
            printf '%s\n' $argv[1](complete -C "__nsq_of_files $argv[2]")
        case @dir
            printf '%s\n' $argv[1](__fish_complete_directories $argv[2])
        case @options
            string match -qr -- '[=,]' $argv[2]; or printf '%s\n' $argv[1](__nsq_client_options)
        case '@*'
            # OLD=NEW: what precedes the last = stays
            set -l start (string replace -rf -- '(.*=).*' '$1' $argv[2])
            printf '%s\n' "$argv[1]$start"(__nsq_names (string sub -s 2 -- $spec))
        case '*'
            printf '%s\n' $argv[1](string split -- '|' $spec)
    end
end

# Ask nsq for names; it gives up after a second, and is silent when it knows none.
function __nsq_names --no-scope-shadowing
    test $argv[1] = channels; and test -n "$topic"; and set -a cluster --topic $topic
    set -l asked (string replace -r -- '^~/' "$HOME/" $program)
    $asked __complete $argv[1] $cluster 2>/dev/null </dev/null
end

function __nsq_client_options
    printf '%s\t%s\n' \
        'dial_timeout=' 'time to connect, name resolution included' \
        'read_timeout=' 'give up a connection that was silent for this long' \
        'write_timeout=' 'give up a connection whose writes made no progress for this long' \
        'local_addr=' 'local host:port to connect from' \
        'reconnect_base=' 'first delay before an nsqd given by address is tried again; doubles' \
        'reconnect_max=' 'longest delay between such tries' \
        'lookupd_poll_interval=' 'time between lookups' \
        'lookupd_poll_jitter=' 'share of the interval added at random to each delay' \
        'lookupd_poll_timeout=' 'time for a daemon to answer over HTTP, connecting included' \
        'allow_announced=' 'addresses that nsqlookupd may announce, as patterns of HOST:PORT separated by blanks (*.internal:4150); nsqd elsewhere are left out (default: all are believed)' \
        'lookupd_authorization=' 'send the auth secret to nsqlookupd as a bearer token (go-nsq\'s skip_lookupd_authorization=true means the same)' \
        'client_id=' 'name of this client (default: the short host name)' \
        'hostname=' 'host name to report (default: this machine\'s)' \
        'user_agent=' 'program to report' \
        'topology_region=' 'region to report' \
        'topology_zone=' 'zone to report' \
        'heartbeat_interval=' 'time between heartbeats, 1s to 60s; -1s disables them (producers only)' \
        'sample_rate=' 'percent of messages to receive; nsqd discards the rest' \
        'output_buffer_size=' 'bytes that nsqd buffers, 64 to 65536; -1 disables' \
        'output_buffer_timeout=' 'longest time nsqd holds a message in its buffer, 25ms to 30s; -1s disables' \
        'msg_timeout=' 'time to answer a message before it is delivered again (0: nsqd\'s default)' \
        'tls_v1=' 'use TLS, and nothing else' \
        'tls_root_ca_file=' 'certificates to trust, PEM' \
        'tls_cert=' 'client certificate, PEM' \
        'tls_key=' 'key of the client certificate, PEM' \
        'tls_insecure_skip_verify=' 'do not verify nsqd\'s certificate' \
        'tls_min_version=' 'lowest TLS version; below tls1.2 only where the TLS library still can' \
        'snappy=' 'compress with snappy' \
        'deflate=' 'compress with deflate' \
        'deflate_level=' 'deflate level' \
        'tls_pin_sha256=' 'SHA-256 fingerprints of the server certificates to accept, in hexadecimal, separated by blanks; verified besides everything else' \
        'auth_secret=' 'secret for an nsqd that requires AUTH' \
        'auth_secret_file=' 'file with the secret, read again at each connection; auth_secret is used while it cannot be read' \
        'auth_requires_tls=' 'never send the auth secret over a connection without TLS' \
        'max_in_flight=' 'most messages in flight at a time, all nsqd together' \
        'max_attempts=' 'give up a message after this many deliveries that a handler saw (0: never)' \
        'default_requeue_delay=' 'delay of a requeue, times the attempts so far' \
        'max_requeue_delay=' 'longest delay of a requeue' \
        'backoff_strategy=' 'how backoff grows' \
        'backoff_multiplier=' 'unit of backoff' \
        'max_backoff_duration=' 'longest backoff (0: no backoff)' \
        'low_rdy_idle_timeout=' 'take RDY from a connection idle for this long, or sooner, if there is too little for all' \
        'low_rdy_timeout=' 'take RDY from any connection after this time, if others wait' \
        'rdy_redistribute_interval=' 'time between redistributions' \
        'rdy_resend=' 'send RDY again when a quarter is left (auto: only to nsqd before 0.3.0)' \
        'drain_timeout=' 'time for running handlers when stopping' \
        'max_msg_size=' 'largest message to accept, in bytes; a larger one ends the connection (0: no limit)' \
        'max_inflated_read=' 'bytes to which compressed data is expanded at a time; the rest waits its turn' \
        'connect_threads=' 'threads that connect and look up, shared by all clients of the process; the greatest number holds' \
        'max_http_body=' 'largest answer to accept over HTTP, in bytes' \
        'max_discovered_nsqd=' 'most nsqd to believe that nsqlookupd announces; of more, some are drawn at random' \
        'max_outstanding=' 'publish commands that may wait for their answer' \
        'publish_timeout=' 'time for a publish to be confirmed' \
        'publish_max_msg_size=' 'largest message nsqd takes (its --max-msg-size)' \
        'publish_max_body_size=' 'largest batch nsqd takes (its --max-body-size)'
end

# What can follow the words of $argv[1]: commands, options, arguments.
function __nsq_describe --no-scope-shadowing
    set commands
    set options
    set arguments
    switch $argv[1]
        case 'nsq'
            set commands \
                'tail' 'pub' 'peek' 'redrive' 'to-nsq' 'to-http' 'to-file' 'stat' 'archive' 'replay' \
                'top' 'web' 'topic' 'channel' 'nodes' 'lookup' 'ping' 'info' 'tombstone' 'drain' \
                'config' 'spark' 'bench' 'demo' 'nsqd' 'nsqlookupd' 'options' 'profile' 'schema' \
                'compat' 'completion'
            set command_helps \
                'Print the messages of one or more topics as they arrive.' \
                'Publish messages: texts, or the lines of standard input or of files.' \
                'Show some messages of a channel and requeue them.' \
                'Publish dead letters again, to the topics that they came from.' \
                'Forward topics to another nsqd or cluster, each message finished once it is there.' \
                'Send topics to HTTP endpoints, each message finished when an endpoint has accepted it.' \
                'Archive topics to files, each message finished once it is on disk.' \
                'Show depth, rates, clients and latency of topics and channels.' \
                'Check, repair and read archives.' \
                'Publish archived messages again, in order of time.' \
                'Watch topics, channels, consumers and nsqd live, in full screen, and change them.' \
                'Show the cluster in the browser, with nsqadmin\'s API and /metrics of every queue.' \
                'List topics, and create, delete, empty or pause them.' \
                'List channels, and create, delete, empty or pause them.' \
                'List every nsqd: version, topics, tombstones, and whether it answers.' \
                'Show which nsqd have a topic, as nsqlookupd tells consumers.' \
                'Check the health of every daemon.' \
                'Show version, addresses and limits of every nsqd.' \
                'Remove a topic from one nsqd: hide it from consumers, then delete it there.' \
                'Move the messages that are left on one nsqd to another.' \
                'Show the settings in force; read and change options of running nsqd.' \
                'Run archives and topics through Spark.' \
                'Measure the speed and the latency of an nsqd.' \
                'Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.' \
                'Run an nsqd in Python, with the flags, files and protocol of the real one.' \
                'Run an nsqlookupd in Python, with the flags and protocol of the real one.' \
                'List every client option with its default, bounds and meaning.' \
                'List the profiles of the configuration file, and choose one.' \
                'Print the JSON Schema of what a command prints with --json.' \
                'Use the names and flags of NSQ\'s Go utilities with this program.' \
                'Print the completion script for bash, zsh or fish.'
            set options \
                '--version' '-h,--help'
            set option_helps \
                'Show the version and exit.' 'Show this message and exit.'
        case 'nsq tail'
            set options \
                '*-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--until-empty' \
                '--exit-idle=' '--for=' '--create' '--force' '--json' '-f,--format=' '--pick=' \
                '--pretty' '--decode=utf8|hex|base64' '-d,--delimiter=' '--print-topic' '-g,--grep=' \
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '*--nsqd-tcp-address=' \
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Name of the channel.' 'Stop after N.' \
                'Stop when the channel is empty.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Stop after DURATION.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'Continue although the topic has no channel yet and a backlog, which would be lost.' \
                'Print JSON.' \
                'Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; {timestamp:%H:%M:%S}, {body:hex|base64|url|json}, {.user.id} of JSON; \\n \\t \\0 \\xNN; {{ and }} for braces.' \
                'In place of the body, what this makes of its JSON, in jq\'s language (\'.user.id\').' \
                'Indent bodies that are JSON; on a terminal they are colored in any case.' \
                'Show bodies as text, hex or base64.' \
                'What ends each message; \\0 for NUL, \'\' for nothing.' \
                'Print \'TOPIC | \' before a message.' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq pub'
            set options \
                '-t,--topic=@topics' '*-m,--message=' '*-f,--file=@file' '--repeat=' '--interval=' \
                '--format=raw|jsonl' '-d,--delimiter=' '--where=' '--pick=' '--rate=' '--defer=' \
                '--mode=all|round-robin|failover' '--retry-timeout=' '--retry-unknown' \
                '--checkpoint=@file' '--unsent-file=@file' '--json' '*--nsqd-tcp-address=' \
                '-P,--profile=@profiles' '--no-profile' '*-X,--producer-opt=@options' \
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' \
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Name of the topic.' 'Publish this text, whatever it begins with.' \
                'Publish the lines of this file; - for standard input.' \
                'Publish the texts N times, with {n}, {uuid} and {now} or {now:%H:%M} filled in.' \
                'Time between two rounds of --repeat.' \
                'raw: each record is a body. jsonl: what tail --json and archives write.' \
                'What ends each record; \\0 for NUL.' \
                'Publish only bodies that are JSON for which this is true, in jq\'s language.' \
                'Publish what this makes of the JSON in a body, in place of it (\'.user\').' \
                'At most N messages a second; 0 for no limit.' \
                'Defer delivery of each message by DURATION, up to 1h.' \
                'With several nsqd: every message to all of them, to each in turn, or to the first that works.' \
                'How long to retry when nsqd cannot be reached; 0s for not at all.' \
                'Also publish again what nsqd may have accepted just before the connection broke: such messages can arrive twice.' \
                'Record here what is confirmed, and continue from there the next time.' \
                'Append every record that was not confirmed to this file, byte for byte. With --mode all and several nsqd, to one for each: FILE.HOST:PORT.' \
                'Print JSON.' 'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*'
        case 'nsq peek'
            set options \
                '-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--look-at=' \
                '--exit-idle=' '-g,--grep=' '-i,--ignore-case' '--invert' '--where=' '--sample=' \
                '--json' '-f,--format=' '--pick=' '--pretty' '--decode=utf8|hex|base64' \
                '-d,--delimiter=' '--print-topic' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Name of the channel.' 'Messages to show.' \
                'With a filter, look at no more than N messages for those to show.' \
                'Stop after DURATION without messages (5s, 1m30s).' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' 'Print JSON.' \
                'Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; {timestamp:%H:%M:%S}, {body:hex|base64|url|json}, {.user.id} of JSON; \\n \\t \\0 \\xNN; {{ and }} for braces.' \
                'In place of the body, what this makes of its JSON, in jq\'s language (\'.user.id\').' \
                'Indent bodies that are JSON; on a terminal they are colored in any case.' \
                'Show bodies as text, hex or base64.' \
                'What ends each message; \\0 for NUL, \'\' for nothing.' \
                'Print \'TOPIC | \' before a message.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq redrive'
            set options \
                '-t,--topic=@topics' '--error=' '--rate=' '--retry-timeout=' '--unsent-file=@file' \
                '--dry-run' '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile' \
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Publish to this topic; default: the topic of each message.' \
                'Only dead letters whose error matches.' \
                'At most N messages a second; 0 for no limit.' \
                'How long to retry when nsqd cannot be reached; 0s for not at all.' \
                'Append every record that was not confirmed to this file, byte for byte. With --mode all and several nsqd, to one for each: FILE.HOST:PORT.' \
                'Show what would be published, by topic and error.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq to-nsq'
            set options \
                '-c,--channel=@channels' '--destination-topic=' '*--map=' \
                '--mode=round-robin|hash|failover' '--key=' '--require-json-field=' \
                '--require-json-value=' '*--whitelist-json-field=' '--loop-guard,--no-loop-guard' \
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '--pick=' '--rate=' \
                '--max-attempts=' '--dead-letter-topic=' '--dead-letter-file=@file' \
                '--metrics-file=@file' '--listen-http=' '-n,--count=' '--until-empty' '--exit-idle=' \
                '--for=' '--create' '--json' '-g,--grep=' '-i,--ignore-case' '--invert' '--where=' \
                '--sample=' '*--destination-nsqd-tcp-address=' \
                '*--destination-lookupd-http-address=' '*--destination-nsqd-http-address=' \
                '*--destination-address-map=' '--destination-auth-secret-file=@file' \
                '*--producer-opt=@options' '--destination-tls' '--destination-tls-ca-file=@file' \
                '--destination-tls-cert=@file' '--destination-tls-key=@file' \
                '--destination-tls-insecure' '--destination-snappy' '--destination-deflate' \
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Name of the channel.' \
                'Publish everything to this topic; default: each topic under its own name.' \
                'Rename a topic that matches (\'eu\\.(.*)=\\1\'); the first rule that matches counts.' \
                'With several destinations: each in turn, the same for the same --key, or the first that works.' \
                'What --mode hash goes by (\'{.user.id}\').' \
                'Only messages that are JSON objects with this field.' \
                'Only messages whose --require-json-field is this text or number.' \
                'Publish only these fields of JSON objects, their values unchanged.' \
                'Refuse topics whose messages would come back to where they were.' \
                'Name of the topic.' 'Also every topic, now and later, whose name matches.' \
                'How often to look for topics of the pattern.' \
                'In place of the body, what this makes of its JSON, in jq\'s language (\'.user.id\').' \
                'At most N messages a second; 0 for no limit.' \
                'Try a message N times, then it is a dead letter; 0 for no limit. Outages of the destination do not count.' \
                'Publish what cannot be delivered to this topic, on the nsqd that it came from.' \
                'Append what cannot be delivered to this file, as JSON lines that nsq redrive reads.' \
                'Write counts to this file, as Prometheus text.' \
                'Serve /metrics for Prometheus and /health; on loopback unless a host is given.' \
                'Stop after N.' 'Stop when the channel is empty.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Stop after DURATION.' \
                'Continue although the topic does not exist; subscribing creates it.' 'Print JSON.' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' 'nsqd, over TCP.' \
                'nsqlookupd: publish to every nsqd it has.' 'nsqd, over HTTP; checked for loops.' \
                'Connect to NEW in place of OLD.' 'File with the auth secret.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Compress with snappy.' \
                'Compress with deflate.' 'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq to-http'
            set options \
                '-c,--channel=@channels' '*--post=' '*--get=' '--mode=round-robin|hash|failover|all' \
                '--key=' '--concurrency=' '--http-client-connect-timeout=' \
                '--http-client-request-timeout=' '*--on-status=' \
                '--redirects=refuse|same-host|follow' '--private-addresses,--no-private-addresses' \
                '--http-ca-file=@file' '--http-cert=@file' '--http-key=@file' '--http-insecure' \
                '--content-type=' '*--header=' '--metadata,--no-metadata' '--basic-auth-file=@file' \
                '--bearer-token-file=@file' '--sign-key-file=@file' '--batch=' '--batch-bytes=' \
                '--batch-format=ndjson|json' '--linger=' '*-t,--topic=@topics' '--topic-pattern=' \
                '--topic-refresh=' '--pick=' '--rate=' '--max-attempts=' '--dead-letter-topic=' \
                '--dead-letter-file=@file' '--metrics-file=@file' '--listen-http=' '-n,--count=' \
                '--until-empty' '--exit-idle=' '--for=' '--create' '--json' '-g,--grep=' \
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '*--nsqd-tcp-address=' \
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Name of the channel.' \
                'POST bodies to this URL; its path may be a template (\'/{topic}\').' \
                'GET this URL, a template (\'http://h/?m={body:url}\').' \
                'With several URLs: each in turn, the same for the same --key, the first that works, or every message to all.' \
                'What --mode hash goes by (\'{.user.id}\').' 'Requests at a time.' \
                'How long to try to connect.' 'How long to wait for an answer.' \
                'What an answer means: ok, retry, drop or dead-letter. 2xx is ok; 5xx, 401, 403, 404, 408, 425, 429 retry; 3xx and other 4xx dead-letter.' \
                'Whether to follow redirects that keep method and body (307, 308).' \
                'Whether URLs may lead to private networks; redirects to another host never may.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificates of endpoints.' \
                'Content-Type of a POST.' 'A header, its value a template (\'X-Id: {id}\').' \
                'Send Idempotency-Key and X-Nsq-Topic, -Message-Id, -Attempts, -Timestamp.' \
                'File with USER:PASSWORD.' 'File with a bearer token.' \
                'File with a key: sign requests as Standard Webhooks (HMAC-SHA256).' \
                'Send up to N messages in one POST.' 'Send up to SIZE in one POST.' \
                'A batch is a line for each message, or a JSON array.' \
                'How long a message waits for others of its batch.' 'Name of the topic.' \
                'Also every topic, now and later, whose name matches.' \
                'How often to look for topics of the pattern.' \
                'In place of the body, what this makes of its JSON, in jq\'s language (\'.user.id\').' \
                'At most N messages a second; 0 for no limit.' \
                'Try a message N times, then it is a dead letter; 0 for no limit. Outages of the destination do not count.' \
                'Publish what cannot be delivered to this topic, on the nsqd that it came from.' \
                'Append what cannot be delivered to this file, as JSON lines that nsq redrive reads.' \
                'Write counts to this file, as Prometheus text.' \
                'Serve /metrics for Prometheus and /health; on loopback unless a host is given.' \
                'Stop after N.' 'Stop when the channel is empty.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Stop after DURATION.' \
                'Continue although the topic does not exist; subscribing creates it.' 'Print JSON.' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq to-file'
            set options \
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '-c,--channel=@channels' \
                '--on-file=' '--metrics-file=@file' '--listen-http=' '-n,--count=' '--until-empty' \
                '--exit-idle=' '--for=' '--exit-when-deleted' '--create' '--json' \
                '--output-dir=@dir' '--work-dir=@dir' '--filename-format=' '--datetime-format=' \
                '--partition-format=' '--partition-by=arrival|message' '--utc' '--host-identifier=' \
                '--file-mode=' '--dir-mode=' '--format=jsonl|raw' '-d,--delimiter=' '--gzip' \
                '--compression=none|gzip|zstd' '--gzip-level=' '--zstd-level=' '--rotate-size=' \
                '--rotate-text-size=' '--rotate-interval=' '--rotate-age=' \
                '--skip-empty-files,--no-skip-empty-files' '--sync-interval=' '--sync-bytes=' \
                '--sync-count=' '--upload=' '--upload-hive' '*--upload-option=' '--delete-uploaded' \
                '--max-local-bytes=' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Also every topic, now and later, whose name matches.' \
                'How often to look for topics of the pattern.' 'Name of the channel.' \
                'Run for each finished file; {path} stands for the file.' \
                'Write counts to this file, as Prometheus text.' \
                'Serve /metrics for Prometheus and /health; on loopback unless a host is given.' \
                'Stop after N.' 'Stop when the channel is empty.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Stop after DURATION.' \
                'Exit, with status 3, when every --topic was deleted; default: wait for it.' \
                'Continue although the topic does not exist; subscribing creates it.' 'Print JSON.' \
                'Where finished files go.' \
                'Where files in progress go, if not to --output-dir; any file system will do.' \
                'Name of a file: <TOPIC> <HOST> <PID> <DATETIME> <PARTITION> <REV>; / for directories.' \
                '<DATETIME>: the time of arrival.' '<PARTITION>: a time, see --partition-by.' \
                '<PARTITION> is the time of arrival, or of each message.' \
                'Times in names are UTC, not local.' '<HOST>, if not the short host name.' \
                'Permissions of files.' 'Permissions of directories.' \
                'jsonl: a line of JSON with id, time and body, for replay and Spark. raw: bodies and --delimiter, as nsq_to_file writes.' \
                'What ends each body in raw files; \\0 for NUL.' 'Short for --compression gzip.' \
                'Compress files: gzip, or zstd to smaller ones.' \
                'Level of gzip; without it fast with python-isal, else 6.' \
                'Level of zstd; 3 without it.' 'Rotate at this size on disk.' \
                'Rotate at this size before compression.' 'Rotate every DURATION, clock-aligned.' \
                'Rotate DURATION after a file was opened.' \
                'Whether an interval without messages has a file; it has none by default.' \
                'Flush and finish messages every DURATION.' 'Flush when this much text is held.' \
                'Flush when N messages are held.' \
                'Upload finished files there: s3://, gs://, az://, abfss://, hdfs:// or a path.' \
                'Store files below topic=TOPIC/date=DATE/, by their first message.' \
                'A setting of the object store, such as server_side_encryption=aws:kms.' \
                'Remove each local file once it is stored and verified.' \
                'Stop consuming while finished files of this size wait for their upload.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq stat'
            set options \
                '*-t,--topic=@topics' '*-c,--channel=@channels' '--show=queues|nodes|clients|memory' \
                '*--filter=' \
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms' \
                '--interval=' '-n,--count=' '--once' '--csv' '--prometheus' '--max-depth=' \
                '--max-requeue-rate=' '--min-clients=' '-o,--output=table|wide|tsv|csv|json|jsonl' \
                '--columns=' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Only these topics. Names, globs (\'web*\') or /regular expressions/.' \
                'Only these channels. Names, globs (\'web*\') or /regular expressions/.' \
                'A row for each queue, each queue on each nsqd, each consumer, or each nsqd\'s memory.' \
                'Only queues that match: depth>0, clients=0, paused=yes.' \
                'Sort by a column, largest numbers first.' \
                'Sample every DURATION, until --count or until interrupted.' 'Stop after N.' \
                'Take one sample, without waiting and without rates.' 'The same as -o csv.' \
                'Print Prometheus metrics, once.' 'Fail when the depth of a queue is above N.' \
                'Fail when more than N messages a second are requeued or time out.' \
                'Fail when a channel has fewer than N consumers.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq archive'
            set commands \
                'verify' 'repair' 'cat' 'info'
            set command_helps \
                'Read archives and report what is damaged.' \
                'Finish files that a crash left, and repair damaged archives.' \
                'Print the messages in archives of any format and compression.' \
                'List archives with their messages, topics and times.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq archive verify'
            set options \
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive repair'
            set options \
                '-d,--delimiter=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'What ends each body in raw files; \\0 for NUL.' 'Print JSON.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive cat'
            set options \
                '*-t,--topic=@topics' '-n,--count=' '--bodies' '-d,--delimiter=' '--since=' \
                '--until=' '--json' '-f,--format=' '--pick=' '--pretty' '-g,--grep=' \
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Only messages of these topics. Names, globs (\'web*\') or /regular expressions/.' \
                'Stop after N.' 'Print only the bodies, each ended by --delimiter.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' 'Print JSON.' \
                'Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; {timestamp:%H:%M:%S}, {body:hex|base64|url|json}, {.user.id} of JSON; \\n \\t \\0 \\xNN; {{ and }} for braces.' \
                'In place of the body, what this makes of its JSON, in jq\'s language (\'.user.id\').' \
                'Indent bodies that are JSON; on a terminal they are colored in any case.' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive info'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq replay'
            set options \
                '*-t,--topic=@topics' '--since=' '--until=' '*--from-topic=' '-n,--count=' \
                '--dedupe' '-d,--delimiter=' '--rate=' '--speed=' '--mode=all|round-robin|failover' \
                '--retry-timeout=' '--retry-unknown' '--checkpoint=@file' '--unsent-file=@file' \
                '--dry-run' '--json' '-g,--grep=' '-i,--ignore-case' '--invert' '--where=' \
                '--sample=' '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile' \
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Where to publish, if not to the topic that a message came from.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' \
                'Only messages of these topics. Names, globs (\'web*\') or /regular expressions/.' \
                'Stop after N.' \
                'Each message once, by topic, nsqd and id. Remembers the id of every message.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'At most N messages a second; 0 for no limit.' \
                'Multiple of the original speed (1x, 10x); as fast as possible without it.' \
                'With several nsqd: every message to all of them, to each in turn, or to the first that works.' \
                'How long to retry when nsqd cannot be reached; 0s for not at all.' \
                'Also publish again what nsqd may have accepted just before the connection broke: such messages can arrive twice.' \
                'Record here what is confirmed, and continue from there the next time.' \
                'Append every message that was not confirmed to this file, as JSON. With --mode all and several nsqd, to one for each: FILE.HOST:PORT.' \
                'Publish nothing; print how many messages would go to which topic.' 'Print JSON.' \
                'Only messages whose body matches, a regular expression.' 'Ignore case in --grep.' \
                'Only messages whose body does not match --grep.' \
                'Only messages whose body is JSON for which this is true, in jq\'s language (\'.status >= 500\').' \
                'Only this share of the messages, drawn at random (10%, 0.1).' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq top'
            set options \
                '*-t,--topic=@topics' '--interval=' '--columns=' \
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms' \
                '*--filter=' '--allow-changes' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Only these topics. Names, globs (\'web*\') or /regular expressions/.' \
                'Time between two samples.' \
                'Columns to show, in this order, in each view those that it has.' \
                'Sort by a column, largest numbers first.' \
                'Only lines that match: depth>0, clients=0, paused=yes.' \
                'Let keys pause, unpause, empty and delete, tail and peek.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq web'
            set options \
                '--listen=' '--refresh=' '--history=@file' '--base-path=@file' \
                '--print=dashboard|alerts|password' '--allow-changes' '--show-messages' \
                '--auth=@file' '*--admin-user=' '--acl-http-header=' '*--trusted-proxy=' \
                '*--allowed-host=' '--listen-tls-cert=@file' '--listen-tls-key=@file' \
                '--audit-log=@file' '--notification-http-endpoint=' '*--nsqd-http-address=' \
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls' \
                '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Where to serve; port 0 takes any free one.' 'Time between two samples.' \
                'Keep 30 days of history in this file.' 'Serve under this path.' \
                'Print a Grafana dashboard, Prometheus alerts, or a line for --auth, and end.' \
                'Let users create, pause, empty and delete; else it is read-only.' \
                'Let users read messages.' 'Ask for a password of this file, USER:HASH.' \
                'Only this user may change something.' \
                'The header in which a trusted proxy names the user.' \
                'Believe that header from these addresses.' \
                'A name under which browsers may open it.' 'Serve https with this certificate, PEM.' \
                'Key of that certificate, PEM.' 'Append a line of JSON for each change.' \
                'POST a document to this URL for each change, as nsqadmin does.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq topic'
            set commands \
                'list' 'info' 'create' 'delete' 'empty' 'pause' 'unpause'
            set command_helps \
                'List topics, with the number of nsqd that have them and their depth.' \
                'Show one topic and its channels, on every nsqd that has it.' \
                'Create topics: on the nsqd given, and registered with every nsqlookupd given.' \
                'Delete topics, with their channels and messages, everywhere.' \
                'Discard the messages in topics; with --channels, in their channels too.' \
                'Pause topics: messages stay in them and do not reach the channels.' \
                'Resume paused topics.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq topic list'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic info'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics'
        case 'nsq topic create'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic delete'
            set options \
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic empty'
            set options \
                '--channels' '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' \
                '--columns=' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Empty the channels too.' 'Do not ask.' \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic pause'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic unpause'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq channel'
            set commands \
                'list' 'info' 'create' 'delete' 'empty' 'pause' 'unpause'
            set command_helps \
                'List channels, with the number of nsqd that have them and their depth.' \
                'Show one channel and its consumers, on every nsqd that has it.' \
                'Create channels of a topic, on every nsqd that has it and with nsqlookupd.' \
                'Delete channels, with their messages, everywhere.' \
                'Discard the messages in channels, in flight and deferred too.' \
                'Pause channels: messages stay in them and are not delivered.' \
                'Resume paused channels.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq channel list'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq channel info'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '@channels'
        case 'nsq channel create'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel delete'
            set options \
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel empty'
            set options \
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel pause'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel unpause'
            set options \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq nodes'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq lookup'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics'
        case 'nsq ping'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq info'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq tombstone'
            set options \
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '@nodes'
        case 'nsq drain'
            set options \
                '--to=' '--allow-repeats' '-y,--yes' '--dry-run' '--json' '-P,--profile=@profiles' \
                '--no-profile' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level=' \
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls' \
                '*--tls-pin-sha256=' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'HTTP address of the nsqd that takes over.' \
                'Move topics with several channels too: each channel then gets what any of them had left.' \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@nodes'
        case 'nsq config'
            set commands \
                'show' 'path' 'get' 'set'
            set command_helps \
                'Show the settings in force: flags, environment, profile, file, or default.' \
                'Print the path of the configuration file.' 'Show one option of every running nsqd.' \
                'Change one option of every running nsqd, until it exits.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq config show'
            set options \
                '--origin' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Show where each value comes from.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq config path'
            set options \
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq config get'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                ''
        case 'nsq config set'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' \
                '--debug' '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '' ''
        case 'nsq spark'
            set commands \
                'ingest' 'compact' 'report' 'replay' 'doctor' 'sql'
            set command_helps \
                'Stream a topic or an archive into Parquet by topic and date, each message once.' \
                'Turn archives into Parquet by topic and date, with each message once.' \
                'Report what went through topics: messages, bytes, sizes, attempts, duplicates and gaps.' \
                'Publish messages from archives and Parquet again, in parallel.' \
                'Check Java, versions, executors, the shared directory and nsqd.' \
                'Query archives and Parquet in SQL.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq spark ingest'
            set options \
                '-o,--output=@dir' '--checkpoint=@dir' '--format=parquet|delta' '-t,--topic=@topics' \
                '-c,--channel=@channels' '--once' '--for=' '--trigger=' '--max-rows-per-trigger=' \
                '--spool-dir=@dir' '--raw' '--work-dir=@dir' '--skip-damaged' '--create' \
                '--metrics-file=@file' '--json' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile' \
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Where the Parquet files or the Delta table go: a directory, or s3://BUCKET/PREFIX.' \
                'Where the stream records its progress.' 'What to write: parquet or delta.' \
                'A live topic, not an archive.' 'Name of the channel.' 'Take what is there and end.' \
                'Stop after DURATION.' 'Time between batches; 0s for none.' \
                'At most about N messages in a batch.' \
                'Where a topic\'s messages wait for their batch; default: in the checkpoint.' \
                'Read files of bare bodies too (nsq_to_file).' \
                'Where nsq to-file has its files in progress, if not with the finished ones.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'Write counts, rate and lag to this file, as Prometheus text.' 'Print JSON.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@dir'
        case 'nsq spark compact'
            set options \
                '-o,--output=@dir' '--format=parquet|delta' '*-t,--topic=@topics' '--day=' \
                '--until-day=' '--grace=' '--open-days' '--work-dir=@dir' '--skip-damaged' \
                '--delete-archives' '--dry-run' '-y,--yes' '-d,--delimiter=' '--json' '--master=' \
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Where the Parquet files or the Delta table go: a directory, or s3://BUCKET/PREFIX.' \
                'What to write: parquet, or delta, whose readers never see a day half replaced.' \
                'Only these topics.' 'Only this day (2026-11-21, in UTC), which must be closed.' \
                'Only closed days up to this one.' \
                'How long after midnight (UTC) a day stays open for late messages.' \
                'Take days that are not closed too; a later run merges what is still to come.' \
                'Where nsq to-file has its files in progress, if not with the finished ones.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Afterwards delete the archives of which every message is in verified Parquet.' \
                'Show what would change, and change nothing.' 'Do not ask.' \
                'What ends each body in raw files; \\0 for NUL.' 'Print JSON.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@dir'
        case 'nsq spark report'
            set options \
                '--by=hour|day' '*-t,--topic=@topics' '--since=' '--until=' '--gap=' '--html=@file' \
                '-d,--delimiter=' '--skip-damaged' '--damage-dir=@dir' \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '--master=' \
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Length of an interval.' 'Only these.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' \
                'A topic in which nothing was published for longer has a gap.' \
                'Write a page with charts, which needs no network.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Where executors of a cluster report damage: a shared directory, or s3://BUCKET/PREFIX.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq spark replay'
            set options \
                '*-t,--topic=@topics' '--since=' '--until=' '--where=' '-d,--delimiter=' '--rate=' \
                '--retry-timeout=' '--retry-unknown' '--ledger=@dir' '--dead-letters=@dir' \
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' \
                '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile' \
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--master=' \
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Where to publish, if not to the topic that a message came from.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' \
                'Only messages for which this is true; columns: topic, nsqd, id, timestamp, ts_ns, attempts, body.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'At most N messages a second; 0 for no limit.' \
                'How long to retry when nsqd cannot be reached; 0s for not at all.' \
                'Also publish again what nsqd may have accepted just before the connection broke: such messages can arrive twice.' \
                'Record here what is confirmed, and continue from there the next time.' \
                'Write messages that cannot be published there, as JSON with the reason.' \
                'Publish nothing; print how many messages would go to which topic.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq spark doctor'
            set options \
                '--shared-dir=@dir' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced=' \
                '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Check that the driver and all executors can write here; also s3://BUCKET/PREFIX.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Certificates to trust, PEM.' 'Client certificate, PEM.' \
                'Key of the client certificate, PEM.' 'Do not verify the certificate of nsqd.' \
                'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Connect to announced nsqd at these addresses only: \'*.internal:4150\'.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq spark sql'
            set options \
                '*--archive=' '*--parquet=' '-f,--file=@file' '-n,--count=' '--skip-damaged' \
                '--damage-dir=@dir' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' \
                '--json' '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Archives under a name of their own.' 'Parquet under a name of its own.' \
                'Read the query from here; - is stdin.' 'Print at most N rows; 0 prints all.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Where executors of a cluster report damage: a shared directory, or s3://BUCKET/PREFIX.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '' '*@file'
        case 'nsq bench'
            set commands \
                'pub' 'sub' 'e2e' 'compare'
            set command_helps \
                'Measure how fast messages are published, each confirmed by nsqd.' \
                'Measure how fast a backlog is consumed, each message finished.' \
                'Measure how long messages take from a publisher through nsqd to a consumer.' \
                'Measure two settings, nsqd or programs in turns, and say whether they differ.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq bench pub'
            set options \
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' \
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address=' \
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--html=@file' \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Messages in one publish command.' \
                'Publish commands of a connection that may be unanswered at a time.' \
                'Publish N messages a second in total; 0 for full speed.' 'Measure N messages.' \
                'Measure for DURATION; 5s without --count and --for.' \
                'Run for DURATION before the measurement begins.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Write a page with charts, which needs no network.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq bench sub'
            set options \
                '-n,--count=' '--for=' '--create' '-t,--topic=@topics' '--size=' '--connections=' \
                '--embedded' '*--nsqd-tcp-address=' '*--nsqd-http-address=' '-P,--profile=@profiles' \
                '--no-profile' '--max-in-flight=' '*--consumer-opt=@options' \
                '*--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level=' \
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls' \
                '*--tls-pin-sha256=' '--html=@file' '-o,--output=table|wide|tsv|csv|json|jsonl' \
                '--columns=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Measure N messages.' 'Measure for DURATION; 5s without --count and --for.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Write a page with charts, which needs no network.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq bench e2e'
            set options \
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--create' \
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address=' \
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight=' \
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' \
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--html=@file' \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Messages in one publish command.' \
                'Publish commands of a connection that may be unanswered at a time.' \
                'Publish N messages a second in total; 0 for full speed.' 'Measure N messages.' \
                'Measure for DURATION; 5s without --count and --for.' \
                'Run for DURATION before the measurement begins.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or NSQ_AUTH_SECRET has it.' \
                'Never send the auth secret without TLS.' \
                'SHA-256 fingerprint of a server certificate to accept, and no other.' \
                'Write a page with charts, which needs no network.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq bench compare'
            set options \
                '--rounds=' '-n,--count=' '--for=' '*--nsqd-tcp-address=' '*--nsqd-http-address=' \
                '-P,--profile=@profiles' '--no-profile' '--html=@file' \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Rounds of each side; 4 or more can tell.' \
                'Measure N messages in a round; 100000 for sub and programs.' \
                'Measure for DURATION in a round; 2s without --count and --for.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Use no profile: neither that of NSQ_PROFILE nor the one that nsq profile use chose.' \
                'Write a page with charts, which needs no network.' \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '' ''
        case 'nsq demo'
            set options \
                '--spark,--no-spark' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'End with the part that needs Spark, or leave it out.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq nsqd'
            set options \
                '*-auth-http-address=' '-broadcast-address=' '-broadcast-http-port=' \
                '-broadcast-tcp-port=' '-config=@file' '-data-path=@dir' '-dead-letter-topic=' \
                '-deflate?=true|false' '-durable?=true|false' '*-e2e-processing-latency-percentile=' \
                '-e2e-processing-latency-window-time=' '-http-address=' \
                '-http-client-connect-timeout=' '-http-client-request-timeout=' '-https-address=' \
                '-log-level=debug|info|warn|error|fatal' '-log-prefix=' '*-lookupd-tcp-address=' \
                '-max-attempts=' '-max-body-size=' '-max-bytes-per-file=' '-max-channel-consumers=' \
                '-max-deflate-level=' '-max-depth=' '-max-heartbeat-interval=' '-max-msg-size=' \
                '-max-msg-timeout=' '-max-output-buffer-size=' '-max-output-buffer-timeout=' \
                '-max-queue-bytes=' '-max-rdy-count=' '-max-req-timeout=' '-mem-queue-size=' \
                '-min-disk-free=' '-min-output-buffer-timeout=' '-msg-timeout=' '-node-id=' \
                '-output-buffer-timeout=' '-overflow-policy=' '-queue-scan-selection-count=' \
                '-queue-scan-worker-pool-max=' '-recover-only?=true|false' '-snappy?=true|false' \
                '-statsd-address=' '-statsd-exclude-ephemeral?=true|false' '-statsd-interval=' \
                '-statsd-mem-stats?=true|false' '-statsd-prefix=' '-statsd-udp-packet-size=' \
                '-sync-every=' '-sync-timeout=' '-tcp-address=' '-tls-cert=@file' \
                '-tls-client-auth-policy=require|require-verify' '-tls-key=@file' \
                '-tls-min-version=tls1.2|tls1.3' '-tls-required?=true|false|tcp-https' \
                '-tls-root-ca-file=@file' '-verbose?=true|false' '-version?=true|false' \
                '-worker-id?=true|false'
            set option_helps \
                '<addr>:<port> or a full url to query auth server (may be given multiple times)' \
                'address that will be registered with lookupd (defaults to the OS hostname)' \
                'HTTP port that will be registered with lookupd (defaults to the HTTP port that this nsqd is listening on)' \
                'TCP port that will be registered with lookupd (defaults to the TCP port that this nsqd is listening on)' \
                'path to config file' 'path to store disk-backed messages' \
                '[not in Go\'s nsqd] topic for the bodies of such messages; {topic} and {channel} are replaced (default "{topic}.dead")' \
                'enable deflate feature negotiation (client compression) (default true)' \
                '[not in Go\'s nsqd] confirm a publish when it is on disk; deferred and unfinished messages survive a kill or a power failure (the Go nsqd can open the data path after a stop in order, or after --recover-only)' \
                'message processing time percentiles (as float (0, 1.0]) to track (can be specified multiple times or comma separated \'1.0,0.99,0.95\', default none)' \
                'calculate end to end latency quantiles for this duration of time (ie: 60s would only show quantile calculations from the past 60 seconds) (default 10m0s)' \
                'address to listen on for HTTP clients (<addr>:<port> for TCP/IP or <path> for unix socket) (default "0.0.0.0:4151")' \
                'timeout for HTTP connect (default 2s)' 'timeout for HTTP request (default 5s)' \
                '<addr>:<port> to listen on for HTTPS clients (default "0.0.0.0:4152")' \
                'set log verbosity: debug, info, warn, error, or fatal (default INFO)' \
                'log message prefix (default "[nsqd] ")' \
                'lookupd TCP address (may be given multiple times)' \
                '[not in Go\'s nsqd] publish a message that comes back after so many attempts to --dead-letter-topic, and finish it' \
                'maximum size of a single command body (default 5242880)' \
                'number of bytes per diskqueue file before rolling (default 104857600)' \
                'maximum channel consumer connection count per nsqd instance (default 0, i.e., unlimited)' \
                'max deflate compression level a client can negotiate (> values == > nsqd CPU usage) (default 6)' \
                '[not in Go\'s nsqd] maximum number of messages that wait in a topic or channel' \
                'maximum client configurable duration of time between client heartbeats (default 1m0s)' \
                'maximum size of a single message in bytes (default 1048576)' \
                'maximum duration before a message will timeout (default 15m0s)' \
                'maximum client configurable size (in bytes) for a client output buffer (default 65536)' \
                'maximum client configurable duration of time between flushing to a client (default 30s)' \
                '[not in Go\'s nsqd] maximum number of bytes that wait in a topic or channel' \
                'maximum RDY count for a client (default 2500)' \
                'maximum requeuing timeout for a message (default 1h0m0s)' \
                'number of messages to keep in memory (per topic/channel) (default 10000)' \
                '[not in Go\'s nsqd] refuse publishes while the data path has fewer bytes free' \
                'minimum client configurable duration of time between flushing to a client (default 25ms)' \
                'default duration to wait before auto-requeing a message (default 1m0s)' \
                'unique part for message IDs, (int) in range [0,1024) (default is hash of hostname)' \
                'default duration of time between flushing data to clients (default 250ms)' \
                '[not in Go\'s nsqd] what happens to a publish over these limits: \'refuse\' it, or \'drop-oldest\' messages of the queue (default "refuse")' \
                'number of channels to check per cycle (every 100ms) for in-flight and deferred timeouts (default 20)' \
                'max concurrency for checking in-flight and deferred message timeouts (default 4)' \
                '[not in Go\'s nsqd] write what a killed nsqd with --durable left to files of Go\'s format, and exit' \
                'enable snappy feature negotiation (client compression) (default true)' \
                'UDP <addr>:<port> of a statsd daemon for pushing stats' \
                'Skip ephemeral topics and channels when sending stats to statsd' \
                'duration between pushing to statsd (default 1m0s)' \
                'toggle sending memory and GC stats to statsd (default true)' \
                'prefix used for keys sent to statsd (%s for host replacement) (default "nsq.%s")' \
                'the size in bytes of statsd UDP packets (default 508)' \
                'number of messages per diskqueue fsync (default 2500)' \
                'duration of time per diskqueue fsync (default 2s)' \
                'address to listen on for TCP clients (<addr>:<port> for TCP/IP or <path> for unix socket) (default "0.0.0.0:4150")' \
                'path to certificate file' \
                'client certificate auth policy (\'require\' or \'require-verify\')' \
                'path to key file' \
                'minimum SSL/TLS version acceptable (\'tls1.0\', \'tls1.1\', \'tls1.2\' or \'tls1.3\') (default tls1.0)' \
                'require TLS for client connections (true, false, tcp-https)' \
                'path to certificate authority file' '[deprecated] has no effect, use --log-level' \
                'print version string' '[deprecated] use --node-id'
            set has_go_flags yes
        case 'nsq nsqlookupd'
            set options \
                '-broadcast-address=' '-config=@file' '-http-address=' '-inactive-producer-timeout=' \
                '-log-level=debug|info|warn|error|fatal' '-log-prefix=' '-tcp-address=' \
                '-tombstone-lifetime=' '-verbose?=true|false' '-version?=true|false'
            set option_helps \
                'address of this lookupd node, (default to the OS hostname)' 'path to config file' \
                '<addr>:<port> to listen on for HTTP clients (default "0.0.0.0:4161")' \
                'duration of time a producer will remain in the active list since its last ping (default 5m0s)' \
                'set log verbosity: debug, info, warn, error, or fatal (default INFO)' \
                'log message prefix (default "[nsqlookupd] ")' \
                '<addr>:<port> to listen on for TCP clients (default "0.0.0.0:4160")' \
                'duration of time a producer will remain tombstoned if registration remains (default 45s)' \
                '[deprecated] has no effect, use --log-level' 'print version string'
            set has_go_flags yes
        case 'nsq options'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq profile'
            set commands \
                'ls' 'use' 'show'
            set command_helps \
                'List the profiles of the configuration file, and which one is used.' \
                'Choose the profile that commands use when neither --profile nor NSQ_PROFILE names one.' \
                'Show what a profile sets, over the settings at the top of the file.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq profile ls'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq profile use'
            set options \
                '--none' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--color=auto|always|never' '--debug' '-h,--help'
            set option_helps \
                'Use no profile from now on.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@profiles'
        case 'nsq profile show'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@profiles'
        case 'nsq schema'
            set options \
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug' \
                '-h,--help'
            set option_helps \
                'Form of the listing; wide leaves out no column, jsonl has a row on each line.' \
                'Columns to show, in this order; with json, rows of these instead of the document.' \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' \
                'Color what is printed; auto: on a terminal, unless NO_COLOR is set.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*'
        case 'nsq compat'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
            set arguments \
                '' '' ''
        case 'nsq completion'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
            set arguments \
                'bash|zsh|fish'
        case '*'
            return 1
    end
    return 0
end

complete -c nsq -f -a '(__nsq_complete)'
