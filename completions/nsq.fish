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
        case --nsqd-http-address --lookupd-http-address --nsqd-tcp-address --address-map -P --profile --tls-ca-file --tls-cert --tls-key --tls-min-version --auth-secret-file --timeout
            set -a cluster $argv[1] $argv[2]
        case --tls-insecure --lookupd-authorization
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
        'lookupd_poll_timeout=' 'time for a daemon to answer over HTTP' \
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
        'auth_secret=' 'secret for an nsqd that requires AUTH' \
        'max_in_flight=' 'most messages in flight at a time, all nsqd together' \
        'max_attempts=' 'give up a message after this many deliveries that a handler saw (0: never)' \
        'max_msg_size=' 'largest message to accept, in bytes (0: no limit)' \
        'default_requeue_delay=' 'delay of a requeue, times the attempts so far' \
        'max_requeue_delay=' 'longest delay of a requeue' \
        'backoff_strategy=' 'how backoff grows' \
        'backoff_multiplier=' 'unit of backoff' \
        'max_backoff_duration=' 'longest backoff (0: no backoff)' \
        'low_rdy_idle_timeout=' 'take RDY from a connection idle for this long, if there is too little for all' \
        'low_rdy_timeout=' 'take RDY from any connection after this time, if others wait' \
        'rdy_redistribute_interval=' 'time between redistributions' \
        'rdy_resend=' 'send RDY again when a quarter is left (auto: only to nsqd before 0.3.0)' \
        'drain_timeout=' 'time for running handlers when stopping' \
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
                'tail' 'pub' 'peek' 'to-file' 'stat' 'archive' 'replay' 'top' 'topic' 'channel' \
                'nodes' 'lookup' 'ping' 'info' 'tombstone' 'drain' 'config' 'spark' 'bench' 'demo' \
                'nsqd' 'nsqlookupd' 'options' 'completion'
            set command_helps \
                'Print the messages of one or more topics as they arrive.' \
                'Publish the lines of standard input, or of files, to a topic.' \
                'Show some messages of a channel and requeue them.' \
                'Archive topics to files, each message finished once it is on disk.' \
                'Show depth, rates, clients and latency of topics and channels.' \
                'Check, repair and read archives.' \
                'Publish archived messages again, in order of time.' \
                'Watch topics, channels and consumers live, in full screen.' \
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
                'Print the completion script for bash, zsh or fish.'
            set options \
                '--version' '-h,--help'
            set option_helps \
                'Show the version and exit.' 'Show this message and exit.'
        case 'nsq tail'
            set options \
                '*-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--exit-idle=' '--for=' \
                '--create' '--force' '--json' '-f,--format=' '--decode=utf8|hex|base64' \
                '-d,--delimiter=' '--print-topic' '-g,--grep=' '-i,--ignore-case' '--invert' \
                '--sample=' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Name of the channel.' 'Stop after N.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Stop after DURATION.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'Continue although the topic has no channel yet and a backlog, which would be lost.' \
                'Print JSON.' \
                'Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; {timestamp:%H:%M:%S}, {body:hex|base64|json}; \\n \\t \\0 \\xNN; {{ and }} for braces.' \
                'Show bodies as text, hex or base64.' \
                'What ends each message; \\0 for NUL, \'\' for nothing.' \
                'Print \'TOPIC | \' before a message.' \
                'Only messages whose body matches; the others are finished and not printed.' \
                'Ignore case in --grep.' 'Only messages whose body does not match --grep.' \
                'Only this share of the messages, drawn at random (10%, 0.1).' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq pub'
            set options \
                '-t,--topic=@topics' '*-m,--message=' '--format=raw|jsonl' '-d,--delimiter=' \
                '--rate=' '--defer=' '--mode=all|round-robin|failover' '--retry-timeout=' \
                '--retry-unknown' '--unsent-file=@file' '--json' '*--nsqd-tcp-address=' \
                '-P,--profile=@profiles' '*-X,--producer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Publish this text, and do not read standard input.' \
                'raw: each record is a body. jsonl: what tail --json and archives write.' \
                'What ends each record; \\0 for NUL.' 'At most N messages a second; 0 for no limit.' \
                'Defer delivery of each message by DURATION, up to 1h.' \
                'With several nsqd: every message to all of them, to each in turn, or to the first that works.' \
                'How long to retry when nsqd cannot be reached; 0s for not at all.' \
                'Also publish again what nsqd may have accepted just before the connection broke: such messages can arrive twice.' \
                'Append every record that was not confirmed to this file, byte for byte. With --mode all and several nsqd, to one for each: FILE.HOST:PORT.' \
                'Print JSON.' 'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq peek'
            set options \
                '-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--exit-idle=' '--json' \
                '-f,--format=' '--decode=utf8|hex|base64' '-d,--delimiter=' '--print-topic' \
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--max-in-flight=' \
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Name of the channel.' 'Messages to show.' \
                'Stop after DURATION without messages (5s, 1m30s).' 'Print JSON.' \
                'Print by a template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; {timestamp:%H:%M:%S}, {body:hex|base64|json}; \\n \\t \\0 \\xNN; {{ and }} for braces.' \
                'Show bodies as text, hex or base64.' \
                'What ends each message; \\0 for NUL, \'\' for nothing.' \
                'Print \'TOPIC | \' before a message.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq to-file'
            set options \
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '-c,--channel=@channels' \
                '--on-file=' '--metrics-file=@file' '-n,--count=' '--until-empty' '--exit-idle=' \
                '--for=' '--exit-when-deleted' '--create' '--json' '--output-dir=@dir' \
                '--work-dir=@dir' '--filename-format=' '--datetime-format=' '--partition-format=' \
                '--partition-by=arrival|message' '--utc' '--host-identifier=' '--file-mode=' \
                '--dir-mode=' '--format=jsonl|raw' '-d,--delimiter=' '--gzip' '--gzip-level=' \
                '--rotate-size=' '--rotate-text-size=' '--rotate-interval=' '--rotate-age=' \
                '--skip-empty-files,--no-skip-empty-files' '--sync-interval=' '--sync-bytes=' \
                '--sync-count=' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Name of the topic.' 'Also every topic, now and later, whose name matches.' \
                'How often to look for topics of the pattern.' 'Name of the channel.' \
                'Run for each finished file; {path} stands for the file.' \
                'Write counts to this file, as Prometheus text.' 'Stop after N.' \
                'Stop when the channel is empty.' \
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
                'What ends each body in raw files; \\0 for NUL.' 'Compress files.' \
                'Compress at this level; without it fast with python-isal, else 6.' \
                'Rotate at this size on disk.' 'Rotate at this size before compression.' \
                'Rotate every DURATION, clock-aligned.' 'Rotate DURATION after a file was opened.' \
                'Whether an interval without messages has a file; it has none by default.' \
                'Flush and finish messages every DURATION.' 'Flush when this much text is held.' \
                'Flush when N messages are held.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq stat'
            set options \
                '*-t,--topic=@topics' '*-c,--channel=@channels' '--show=queues|nodes|clients|memory' \
                '*--filter=' \
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms' \
                '--interval=' '-n,--count=' '--once' '--json' '--csv' '--prometheus' '--max-depth=' \
                '--max-requeue-rate=' '--min-clients=' '*--nsqd-http-address=' \
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Only these topics: names, or globs such as \'web*\'.' \
                'Only these channels: names, or globs such as \'tail*\'.' \
                'A row for each queue, each queue on each nsqd, each consumer, or each nsqd\'s memory.' \
                'Only queues that match: depth>0, clients=0, paused=yes.' \
                'Sort by a column, largest numbers first.' \
                'Sample every DURATION, until --count or until interrupted.' 'Stop after N.' \
                'Take one sample, without waiting and without rates.' 'Print JSON.' 'Print CSV.' \
                'Print Prometheus metrics, once.' 'Fail when the depth of a queue is above N.' \
                'Fail when more than N messages a second are requeued or time out.' \
                'Fail when a channel has fewer than N consumers.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
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
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive repair'
            set options \
                '-d,--delimiter=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
            set option_helps \
                'What ends each body in raw files; \\0 for NUL.' 'Print JSON.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive cat'
            set options \
                '--bodies' '-d,--delimiter=' '--since=' '--until=' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print only the bodies, each ended by --delimiter.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq archive info'
            set options \
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq replay'
            set options \
                '*-t,--topic=@topics' '--since=' '--until=' '-g,--grep=' '--dedupe' \
                '-d,--delimiter=' '--rate=' '--speed=' '--mode=all|round-robin|failover' \
                '--retry-timeout=' '--retry-unknown' '--checkpoint=@file' '--unsent-file=@file' \
                '--dry-run' '--json' '*--nsqd-tcp-address=' '-P,--profile=@profiles' \
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Where to publish, if not to the topic that a message came from.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' 'Only messages whose body matches.' \
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
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq top'
            set options \
                '*-t,--topic=@topics' '--interval=' '*--nsqd-http-address=' \
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Only these topics: names, or globs such as \'web*\'.' 'Time between two samples.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
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
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic info'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics'
        case 'nsq topic create'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic delete'
            set options \
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic empty'
            set options \
                '--channels' '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' \
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' \
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Empty the channels too.' 'Do not ask.' \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic pause'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq topic unpause'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
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
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '*@topics'
        case 'nsq channel info'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '@channels'
        case 'nsq channel create'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel delete'
            set options \
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel empty'
            set options \
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel pause'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq channel unpause'
            set options \
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show what would change, and change nothing.' 'Print JSON.' 'nsqd, over HTTP.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' '*@channels'
        case 'nsq nodes'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq lookup'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics'
        case 'nsq ping'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq info'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq tombstone'
            set options \
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                '@topics' ''
        case 'nsq drain'
            set options \
                '--to=' '--allow-repeats' '-y,--yes' '--dry-run' '--json' '-P,--profile=@profiles' \
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' \
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'HTTP address of the nsqd that takes over.' \
                'Move topics with several channels too: each channel then gets what any of them had left.' \
                'Do not ask.' 'Show what would change, and change nothing.' 'Print JSON.' \
                'Named settings from the configuration file.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                ''
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
                '--origin' '--json' '*--nsqd-tcp-address=' '*--lookupd-http-address=' \
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--max-in-flight=' '*--consumer-opt=@options' '*--producer-opt=@options' \
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' \
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Show where each value comes from.' 'Print JSON.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq config path'
            set options \
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
        case 'nsq config get'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
            set arguments \
                ''
        case 'nsq config set'
            set options \
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address=' \
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
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
                '-o,--output=@dir' '--checkpoint=@dir' '-t,--topic=@topics' '-c,--channel=@channels' \
                '--once' '--for=' '--trigger=' '--max-rows-per-trigger=' '--spool-dir=@dir' '--raw' \
                '--work-dir=@dir' '--skip-damaged' '--create' '*--nsqd-tcp-address=' \
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map=' \
                '-P,--profile=@profiles' '--max-in-flight=' '*-X,--consumer-opt=@options' \
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' \
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '--master=' '--driver-memory=' \
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
            set option_helps \
                'Where the Parquet files go.' 'Where the stream records its progress.' \
                'A live topic, not an archive.' 'Name of the channel.' 'Take what is there and end.' \
                'Stop after DURATION.' 'Time between batches; 0s for none.' \
                'At most about N messages in a batch.' \
                'Where a topic\'s messages wait for their batch; default: in the checkpoint.' \
                'Read files of bare bodies too (nsq_to_file).' \
                'Where nsq to-file has its files in progress, if not with the finished ones.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Continue although the topic does not exist; subscribing creates it.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'nsqlookupd, over HTTP; finds the nsqd of a topic.' 'nsqd, over HTTP.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '@dir'
        case 'nsq spark compact'
            set options \
                '-o,--output=@dir' '*-t,--topic=@topics' '--day=' '--until-day=' '--grace=' \
                '--open-days' '--work-dir=@dir' '--skip-damaged' '--delete-archives' '--dry-run' \
                '-y,--yes' '-d,--delimiter=' '--json' '--master=' '--driver-memory=' '*--conf=' \
                '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' \
                '-h,--help'
            set option_helps \
                'Where the Parquet files go.' 'Only these topics.' \
                'Only this day (2026-11-21, in UTC), which must be closed.' \
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
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '@dir'
        case 'nsq spark report'
            set options \
                '--by=hour|day' '*-t,--topic=@topics' '--since=' '--until=' '--gap=' '--html=@file' \
                '--json' '-d,--delimiter=' '--skip-damaged' '--master=' '--driver-memory=' \
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
            set option_helps \
                'Length of an interval.' 'Only these.' \
                'Only messages published at this time or later (2026-11-21T08:00:00Z, -2h).' \
                'Only messages published before this time.' \
                'A topic in which nothing was published for longer has a gap.' \
                'Write a page with charts, which needs no network.' 'Print JSON.' \
                'What ends each body in raw files; \\0 for NUL.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq spark replay'
            set options \
                '*-t,--topic=@topics' '--since=' '--until=' '--where=' '-d,--delimiter=' '--rate=' \
                '--retry-timeout=' '--retry-unknown' '--ledger=@dir' '--dead-letters=@dir' \
                '--dry-run' '--json' '*--nsqd-tcp-address=' '-P,--profile=@profiles' \
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' \
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '--master=' '--driver-memory=' \
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
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
                'Publish nothing; print how many messages would go to which topic.' 'Print JSON.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Named settings from the configuration file.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '*@file'
        case 'nsq spark doctor'
            set options \
                '--shared-dir=@dir' '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' \
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout=' \
                '--lookupd-authorization,--no-lookupd-authorization' '--master=' '--driver-memory=' \
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
            set option_helps \
                'Check that the driver and all executors can write here.' 'Print JSON.' \
                'nsqd, over HTTP.' 'nsqlookupd, over HTTP; finds the nsqd of a topic.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' \
                'Connect to NEW in place of OLD, the address that an nsqd announces.' \
                'Named settings from the configuration file.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' \
                'How long a daemon may take to answer over HTTP.' \
                'Send the auth secret to nsqlookupd, as a bearer token.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
        case 'nsq spark sql'
            set options \
                '*--archive=' '*--parquet=' '-f,--file=@file' '-n,--count=' '--json' \
                '--skip-damaged' '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' \
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Archives under a name of their own.' 'Parquet under a name of its own.' \
                'Read the query from here; - is stdin.' 'Print at most N rows; 0 prints all.' \
                'Print one object per row.' \
                'Read what is readable of damaged archives, and report the rest.' \
                'Where Spark runs: local[N,4], spark://HOST:7077, yarn, k8s://URL.' \
                'Heap of the JVM beside this process; in local mode all of Spark is in it.' \
                'Any setting of Spark: spark.executor.memory=4g.' \
                'Where Spark\'s own messages go; default: below ~/.local/state/nsqtools.' \
                'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
            set arguments \
                '' '*@file'
        case 'nsq bench'
            set commands \
                'pub' 'sub' 'e2e'
            set command_helps \
                'Measure how fast messages are published, each confirmed by nsqd.' \
                'Measure how fast a backlog is consumed, each message finished.' \
                'Measure how long messages take from a publisher through nsqd to a consumer.'
            set options \
                '-h,--help'
            set option_helps \
                'Show this message and exit.'
        case 'nsq bench pub'
            set options \
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--json' \
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address=' \
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--max-in-flight=' \
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls' \
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure' \
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate' \
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose' \
                '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Messages in one publish command.' \
                'Publish commands of a connection that may be unanswered at a time.' \
                'Publish N messages a second in total; 0 for full speed.' 'Measure N messages.' \
                'Measure for DURATION; 5s without --count and --for.' \
                'Run for DURATION before the measurement begins.' 'Print JSON.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq bench sub'
            set options \
                '-n,--count=' '--for=' '--create' '--json' '-t,--topic=@topics' '--size=' \
                '--connections=' '--embedded' '*--nsqd-tcp-address=' '*--nsqd-http-address=' \
                '-P,--profile=@profiles' '--max-in-flight=' '*--consumer-opt=@options' \
                '*--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' \
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' \
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level=' \
                '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' \
                '--debug' '-h,--help'
            set option_helps \
                'Measure N messages.' 'Measure for DURATION; 5s without --count and --for.' \
                'Continue although the topic does not exist; subscribing creates it.' 'Print JSON.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq bench e2e'
            set options \
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--create' \
                '--json' '-t,--topic=@topics' '--size=' '--connections=' '--embedded' \
                '*--nsqd-tcp-address=' '*--nsqd-http-address=' '-P,--profile=@profiles' \
                '--max-in-flight=' '*--consumer-opt=@options' '*--producer-opt=@options' \
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' \
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' \
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' \
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Messages in one publish command.' \
                'Publish commands of a connection that may be unanswered at a time.' \
                'Publish N messages a second in total; 0 for full speed.' 'Measure N messages.' \
                'Measure for DURATION; 5s without --count and --for.' \
                'Run for DURATION before the measurement begins.' \
                'Continue although the topic does not exist; subscribing creates it.' 'Print JSON.' \
                'Publish into this topic; by default into one of its own, deleted afterwards.' \
                'Size of a message, or a range to draw it from (100-2KiB).' \
                'Connections each way, each in a process of its own.' \
                'Start and measure the embedded nsqd, which is in Python.' \
                'nsqd, over TCP; 127.0.0.1:4150 when no address is given.' 'nsqd, over HTTP.' \
                'Named settings from the configuration file.' \
                'Messages in flight at a time, all nsqd together.' \
                'Any option of the consumer; \'list\' lists them.' \
                'Any option of the producer; \'list\' lists them.' \
                'Require TLS; never fall back to plain text.' 'Certificates to trust, PEM.' \
                'Client certificate, PEM.' 'Key of the client certificate, PEM.' \
                'Do not verify the certificate of nsqd.' 'Lowest version: tls1.2 or tls1.3.' \
                'Compress with snappy.' 'Compress with deflate.' \
                'Compress with deflate at this level, 1 to 9.' \
                'File with the auth secret; or set NSQ_AUTH_SECRET.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq demo'
            set options \
                '--spark,--no-spark' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' \
                '-h,--help'
            set option_helps \
                'End with the part that needs Spark, or leave it out.' 'Print errors only.' \
                'Log more; -vv logs everything.' 'Format of log lines on stderr.' \
                'Log everything, and show tracebacks of errors.' 'Show this message and exit.'
        case 'nsq nsqd'
            set options \
                '*-auth-http-address=' '-broadcast-address=' '-broadcast-http-port=' \
                '-broadcast-tcp-port=' '-config=@file' '-data-path=@dir' '-deflate?=true|false' \
                '*-e2e-processing-latency-percentile=' '-e2e-processing-latency-window-time=' \
                '-http-address=' '-http-client-connect-timeout=' '-http-client-request-timeout=' \
                '-https-address=' '-log-level=debug|info|warn|error|fatal' '-log-prefix=' \
                '*-lookupd-tcp-address=' '-max-body-size=' '-max-bytes-per-file=' \
                '-max-channel-consumers=' '-max-deflate-level=' '-max-heartbeat-interval=' \
                '-max-msg-size=' '-max-msg-timeout=' '-max-output-buffer-size=' \
                '-max-output-buffer-timeout=' '-max-rdy-count=' '-max-req-timeout=' \
                '-mem-queue-size=' '-min-output-buffer-timeout=' '-msg-timeout=' '-node-id=' \
                '-output-buffer-timeout=' '-queue-scan-selection-count=' \
                '-queue-scan-worker-pool-max=' '-snappy?=true|false' '-statsd-address=' \
                '-statsd-exclude-ephemeral?=true|false' '-statsd-interval=' \
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
                'enable deflate feature negotiation (client compression) (default true)' \
                'message processing time percentiles (as float (0, 1.0]) to track (can be specified multiple times or comma separated \'1.0,0.99,0.95\', default none)' \
                'calculate end to end latency quantiles for this duration of time (ie: 60s would only show quantile calculations from the past 60 seconds) (default 10m0s)' \
                'address to listen on for HTTP clients (<addr>:<port> for TCP/IP or <path> for unix socket) (default "0.0.0.0:4151")' \
                'timeout for HTTP connect (default 2s)' 'timeout for HTTP request (default 5s)' \
                '<addr>:<port> to listen on for HTTPS clients (default "0.0.0.0:4152")' \
                'set log verbosity: debug, info, warn, error, or fatal (default INFO)' \
                'log message prefix (default "[nsqd] ")' \
                'lookupd TCP address (may be given multiple times)' \
                'maximum size of a single command body (default 5242880)' \
                'number of bytes per diskqueue file before rolling (default 104857600)' \
                'maximum channel consumer connection count per nsqd instance (default 0, i.e., unlimited)' \
                'max deflate compression level a client can negotiate (> values == > nsqd CPU usage) (default 6)' \
                'maximum client configurable duration of time between client heartbeats (default 1m0s)' \
                'maximum size of a single message in bytes (default 1048576)' \
                'maximum duration before a message will timeout (default 15m0s)' \
                'maximum client configurable size (in bytes) for a client output buffer (default 65536)' \
                'maximum client configurable duration of time between flushing to a client (default 30s)' \
                'maximum RDY count for a client (default 2500)' \
                'maximum requeuing timeout for a message (default 1h0m0s)' \
                'number of messages to keep in memory (per topic/channel) (default 10000)' \
                'minimum client configurable duration of time between flushing to a client (default 25ms)' \
                'default duration to wait before auto-requeing a message (default 1m0s)' \
                'unique part for message IDs, (int) in range [0,1024) (default is hash of hostname)' \
                'default duration of time between flushing data to clients (default 250ms)' \
                'number of channels to check per cycle (every 100ms) for in-flight and deferred timeouts (default 20)' \
                'max concurrency for checking in-flight and deferred message timeouts (default 4)' \
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
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            set option_helps \
                'Print JSON.' 'Print errors only.' 'Log more; -vv logs everything.' \
                'Format of log lines on stderr.' 'Log everything, and show tracebacks of errors.' \
                'Show this message and exit.'
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
