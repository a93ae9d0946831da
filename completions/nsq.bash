# shellcheck shell=bash disable=SC2034 # variables are shared by the functions
# bash completion for nsq. Rendered by python -m nsqtools.cli.docs: do not edit.

_nsq() {
    local -a before=() words=() commands=() options=() arguments=() cluster=()
    local current='' path='nsq' has_go_flags='' entry='' spec='' prefix=''
    local word name topic='' awaiting='' only_arguments='' count=0
    COMPREPLY=()
    _nsq_split
    _nsq_describe "$path"
    for word in "${before[@]}"; do
        if [[ $awaiting ]]; then
            _nsq_take "$awaiting" "$word"
            awaiting=''
        elif [[ $only_arguments || $word != -?* ]]; then
            if ((${#commands[@]})); then
                path+=" $word"
                _nsq_describe "$path" || return
            else
                _nsq_argument "$count"
                [[ $spec == @topics ]] && topic=${word//[\"\']/}
                ((count += 1))
                [[ $has_go_flags ]] && only_arguments=1
            fi
        elif [[ $word == -- ]]; then
            only_arguments=1
        else
            _nsq_read_option "$word"
        fi
    done
    if [[ $awaiting ]]; then
        _nsq_find "$awaiting" && _nsq_offer_values "$current"
    elif [[ ! $only_arguments && $current == -*=* ]]; then
        [[ $COMP_WORDBREAKS == *=* ]] || prefix=${current%%=*}=
        _nsq_find "${current%%=*}" && _nsq_offer_values "${current#*=}"
    elif [[ ! $only_arguments && $current == -* ]]; then
        _nsq_offer_options
    elif ((${#commands[@]})); then
        _nsq_offer "$current" "${commands[@]}"
    else
        _nsq_argument "$count"
        _nsq_offer_values "$current"
    fi
}

# Sets before to the words before the cursor, joined again, and current to the one at the cursor.
_nsq_split() {
    local rest=$COMP_LINE space last='' index
    for ((index = 0; index <= COMP_CWORD; index++)); do
        space=${rest%%[![:space:]]*}
        rest=${rest#"$space"}
        rest=${rest#"${COMP_WORDS[index]}"}
        if [[ ! $space && $index -gt 0 && ($last == *[=:] || ${COMP_WORDS[index]} == [=:]*) ]]; then
            words[${#words[@]} - 1]+=${COMP_WORDS[index]}
        else
            words+=("${COMP_WORDS[index]}")
        fi
        last=${COMP_WORDS[index]}
    done
    current=${words[${#words[@]} - 1]}
    before=("${words[@]:1:${#words[@]} - 2}")
}

# Find the option that is spelled $1; its word becomes entry, what its value is spec.
_nsq_find() {
    local each names wanted=$1
    [[ $has_go_flags ]] && wanted=-${1#"${1%%[!-]*}"}
    for each in "${options[@]}"; do
        names=${each#[*!]}
        names=${names%%[?=]*}
        if [[ ,$names, == *,"$wanted",* ]]; then
            entry=$each
            spec=''
            [[ $each == *=* ]] && spec=${each#*=}
            return 0
        fi
    done
    return 1
}

# Note the option of a word; where its value is the next word, awaiting is its name.
_nsq_read_option() {
    local name=${1%%=*} rest
    if [[ ! $has_go_flags && $1 == -[!-]* ]]; then  # letters: -v, -qn 10, -tclicks
        rest=${1:1}
        while [[ $rest ]]; do
            name=-${rest:0:1}
            rest=${rest:1}
            _nsq_find "$name" || return
            _nsq_given
            if [[ $entry == *=* ]]; then
                if [[ $rest ]]; then _nsq_take "$name" "$rest"; else awaiting=$name; fi
                return
            fi
        done
    elif _nsq_find "$name"; then
        _nsq_given
        if [[ $1 == *=* ]]; then
            _nsq_take "$name" "${1#*=}"
        elif [[ $entry == *=* && $entry != *\?=* ]]; then
            awaiting=$name
        else
            _nsq_take "$name"
        fi
    fi
}

# Mark an option that was given, unless it may be repeated: it is not offered again.
_nsq_given() {
    local index
    [[ $entry == [*!]* ]] && return
    for index in "${!options[@]}"; do
        [[ ${options[index]} == "$entry" ]] && options[index]=!$entry
    done
}

# Remember a topic, and what says which cluster to ask.
_nsq_take() {
    local value=${2-}
    value=${value//[\"\']/}
    [[ $entry == *=@topics ]] && topic=${value##*=}
    case $1 in
        --nsqd-http-address | --lookupd-http-address | --nsqd-tcp-address | --address-map | -P | --profile | --tls-ca-file | --tls-cert | --tls-key | --tls-min-version | --auth-secret-file | --tls-pin-sha256 | --timeout | --allow-announced) cluster+=("$1" "$value") ;;
        --no-profile | --tls-insecure | --auth-requires-tls | --lookupd-authorization) cluster+=("$1") ;;
    esac
}

# What the argument with the number $1 is, from 0: spec. The last may be repeated.
_nsq_argument() {
    local last=$((${#arguments[@]} - 1))
    spec=-
    if (($1 <= last)); then
        spec=${arguments[$1]#\*}
    elif ((last >= 0)) && [[ ${arguments[last]} == \** ]]; then
        spec=${arguments[last]#\*}
    fi
}

_nsq_offer_options() {
    local each names dash=''
    local -a found=()
    [[ $has_go_flags && $current == --* ]] && dash=-
    for each in "${options[@]}"; do
        [[ $each == !* ]] && continue
        names=${each#\*}
        names=${names%%[?=]*}
        found+=("$dash${names//,/ }")
    done
    # shellcheck disable=SC2068 # the spellings of one option are words of their own
    _nsq_offer "$current" ${found[@]}
}

# Offer values like $1, as spec says.
_nsq_offer_values() {
    local line
    case $spec in
        '' | -) ;;
        @file | @dir)
            [[ $spec == @file ]] && line=-f || line=-d
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do
                COMPREPLY+=("$prefix$line")
            done < <(compgen "$line" -- "$1")
            ;;
        @options)
            [[ $1 == *[=,]* ]] && return
            compopt -o nospace 2>/dev/null
            # shellcheck disable=SC2086 # words
            _nsq_offer "$1" $_nsq_client_options
            ;;
        @*) _nsq_offer_names "${spec#@}" "$1" ;;
        *)
            local IFS='|'
            # shellcheck disable=SC2086 # words
            _nsq_offer "$1" $spec
            ;;
    esac
}

# Ask nsq for names; it gives up after a second, and is silent when it knows none.
_nsq_offer_names() {
    local line
    local -a found=() of_topic=()
    [[ $1 == channels && $topic ]] && of_topic=(--topic "$topic")
    while IFS= read -r line; do
        found+=("$line")
    done < <("${words[0]/#\~\//$HOME/}" __complete "$1" "${of_topic[@]}" "${cluster[@]}" \
        2>/dev/null </dev/null)
    _nsq_offer "${2##*=}" "${found[@]}"
}

# Offer those of the words that begin with $1.
_nsq_offer() {
    local start=$1 each split=''
    shift
    # bash has split an address at its colon, and replaces only what follows
    [[ $COMP_WORDBREAKS == *:* && $start == *:* ]] && split=${start%:*}:
    for each in "$@"; do
        [[ $each == "$start"* ]] && COMPREPLY+=("$prefix${each#"$split"}")
    done
}

_nsq_client_options='dial_timeout= read_timeout= write_timeout= local_addr= reconnect_base= reconnect_max= lookupd_poll_interval= lookupd_poll_jitter= lookupd_poll_timeout= allow_announced= lookupd_authorization= client_id= hostname= user_agent= topology_region= topology_zone= heartbeat_interval= sample_rate= output_buffer_size= output_buffer_timeout= msg_timeout= tls_v1= tls_root_ca_file= tls_cert= tls_key= tls_insecure_skip_verify= tls_min_version= snappy= deflate= deflate_level= tls_pin_sha256= auth_secret= auth_secret_file= auth_requires_tls= max_in_flight= max_attempts= default_requeue_delay= max_requeue_delay= backoff_strategy= backoff_multiplier= max_backoff_duration= low_rdy_idle_timeout= low_rdy_timeout= rdy_redistribute_interval= rdy_resend= drain_timeout= max_msg_size= max_inflated_read= connect_threads= max_http_body= max_discovered_nsqd= max_outstanding= publish_timeout= publish_max_msg_size= publish_max_body_size='

# What can follow the words of $1: commands, options, arguments.
_nsq_describe() {
    commands=() options=() arguments=() has_go_flags=''
    case $1 in
        'nsq')
            commands=(
                'tail' 'pub' 'peek' 'redrive' 'to-nsq' 'to-http' 'to-file' 'stat' 'archive' 'replay'
                'top' 'web' 'topic' 'channel' 'nodes' 'lookup' 'ping' 'info' 'tombstone' 'drain'
                'config' 'spark' 'bench' 'demo' 'nsqd' 'nsqlookupd' 'options' 'profile' 'schema'
                'compat' 'completion'
            )
            options=(
                '--version' '-h,--help'
            )
            ;;
        'nsq tail')
            options=(
                '*-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--until-empty'
                '--exit-idle=' '--for=' '--create' '--force' '--json' '-f,--format=' '--pick='
                '--pretty' '--decode=utf8|hex|base64' '-d,--delimiter=' '--print-topic' '-g,--grep='
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '*--nsqd-tcp-address='
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map='
                '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq pub')
            options=(
                '-t,--topic=@topics' '*-m,--message=' '*-f,--file=@file' '--repeat=' '--interval='
                '--format=raw|jsonl' '-d,--delimiter=' '--where=' '--pick=' '--rate=' '--defer='
                '--mode=all|round-robin|failover' '--retry-timeout=' '--retry-unknown'
                '--checkpoint=@file' '--unsent-file=@file' '--json' '*--nsqd-tcp-address='
                '-P,--profile=@profiles' '--no-profile' '*-X,--producer-opt=@options'
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy'
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '*'
            )
            ;;
        'nsq peek')
            options=(
                '-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--look-at='
                '--exit-idle=' '-g,--grep=' '-i,--ignore-case' '--invert' '--where=' '--sample='
                '--json' '-f,--format=' '--pick=' '--pretty' '--decode=utf8|hex|base64'
                '-d,--delimiter=' '--print-topic' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq redrive')
            options=(
                '-t,--topic=@topics' '--error=' '--rate=' '--retry-timeout=' '--unsent-file=@file'
                '--dry-run' '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile'
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq to-nsq')
            options=(
                '-c,--channel=@channels' '--destination-topic=' '*--map='
                '--mode=round-robin|hash|failover' '--key=' '--require-json-field='
                '--require-json-value=' '*--whitelist-json-field=' '--loop-guard,--no-loop-guard'
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '--pick=' '--rate='
                '--max-attempts=' '--dead-letter-topic=' '--dead-letter-file=@file'
                '--metrics-file=@file' '--listen-http=' '-n,--count=' '--until-empty' '--exit-idle='
                '--for=' '--create' '--json' '-g,--grep=' '-i,--ignore-case' '--invert' '--where='
                '--sample=' '*--destination-nsqd-tcp-address='
                '*--destination-lookupd-http-address=' '*--destination-nsqd-http-address='
                '*--destination-address-map=' '--destination-auth-secret-file=@file'
                '*--producer-opt=@options' '--destination-tls' '--destination-tls-ca-file=@file'
                '--destination-tls-cert=@file' '--destination-tls-key=@file'
                '--destination-tls-insecure' '--destination-snappy' '--destination-deflate'
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq to-http')
            options=(
                '-c,--channel=@channels' '*--post=' '*--get=' '--mode=round-robin|hash|failover|all'
                '--key=' '--concurrency=' '--http-client-connect-timeout='
                '--http-client-request-timeout=' '*--on-status='
                '--redirects=refuse|same-host|follow' '--private-addresses,--no-private-addresses'
                '--http-ca-file=@file' '--http-cert=@file' '--http-key=@file' '--http-insecure'
                '--content-type=' '*--header=' '--metadata,--no-metadata' '--basic-auth-file=@file'
                '--bearer-token-file=@file' '--sign-key-file=@file' '--batch=' '--batch-bytes='
                '--batch-format=ndjson|json' '--linger=' '*-t,--topic=@topics' '--topic-pattern='
                '--topic-refresh=' '--pick=' '--rate=' '--max-attempts=' '--dead-letter-topic='
                '--dead-letter-file=@file' '--metrics-file=@file' '--listen-http=' '-n,--count='
                '--until-empty' '--exit-idle=' '--for=' '--create' '--json' '-g,--grep='
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '*--nsqd-tcp-address='
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map='
                '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq to-file')
            options=(
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '-c,--channel=@channels'
                '--on-file=' '--metrics-file=@file' '--listen-http=' '-n,--count=' '--until-empty'
                '--exit-idle=' '--for=' '--exit-when-deleted' '--create' '--json'
                '--output-dir=@dir' '--work-dir=@dir' '--filename-format=' '--datetime-format='
                '--partition-format=' '--partition-by=arrival|message' '--utc' '--host-identifier='
                '--file-mode=' '--dir-mode=' '--format=jsonl|raw' '-d,--delimiter=' '--gzip'
                '--compression=none|gzip|zstd' '--gzip-level=' '--zstd-level=' '--rotate-size='
                '--rotate-text-size=' '--rotate-interval=' '--rotate-age='
                '--skip-empty-files,--no-skip-empty-files' '--sync-interval=' '--sync-bytes='
                '--sync-count=' '--upload=' '--upload-hive' '*--upload-option=' '--delete-uploaded'
                '--max-local-bytes=' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq stat')
            options=(
                '*-t,--topic=@topics' '*-c,--channel=@channels' '--show=queues|nodes|clients|memory'
                '*--filter='
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms'
                '--interval=' '-n,--count=' '--once' '--csv' '--prometheus' '--max-depth='
                '--max-requeue-rate=' '--min-clients=' '-o,--output=table|wide|tsv|csv|json|jsonl'
                '--columns=' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq archive')
            commands=(
                'verify' 'repair' 'cat' 'info'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq archive verify')
            options=(
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive repair')
            options=(
                '-d,--delimiter=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive cat')
            options=(
                '*-t,--topic=@topics' '-n,--count=' '--bodies' '-d,--delimiter=' '--since='
                '--until=' '--json' '-f,--format=' '--pick=' '--pretty' '-g,--grep='
                '-i,--ignore-case' '--invert' '--where=' '--sample=' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive info')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq replay')
            options=(
                '*-t,--topic=@topics' '--since=' '--until=' '*--from-topic=' '-n,--count='
                '--dedupe' '-d,--delimiter=' '--rate=' '--speed=' '--mode=all|round-robin|failover'
                '--retry-timeout=' '--retry-unknown' '--checkpoint=@file' '--unsent-file=@file'
                '--dry-run' '--json' '-g,--grep=' '-i,--ignore-case' '--invert' '--where='
                '--sample=' '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile'
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq top')
            options=(
                '*-t,--topic=@topics' '--interval=' '--columns='
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms'
                '*--filter=' '--allow-changes' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq web')
            options=(
                '--listen=' '--refresh=' '--history=@file' '--base-path=@file'
                '--print=dashboard|alerts|password' '--allow-changes' '--show-messages'
                '--auth=@file' '*--admin-user=' '--acl-http-header=' '*--trusted-proxy='
                '*--allowed-host=' '--listen-tls-cert=@file' '--listen-tls-key=@file'
                '--audit-log=@file' '--notification-http-endpoint=' '*--nsqd-http-address='
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map='
                '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls'
                '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq topic')
            commands=(
                'list' 'info' 'create' 'delete' 'empty' 'pause' 'unpause'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq topic list')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic info')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics'
            )
            ;;
        'nsq topic create')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic delete')
            options=(
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic empty')
            options=(
                '--channels' '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl'
                '--columns=' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic pause')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic unpause')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq channel')
            commands=(
                'list' 'info' 'create' 'delete' 'empty' 'pause' 'unpause'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq channel list')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq channel info')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '@channels'
            )
            ;;
        'nsq channel create')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel delete')
            options=(
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel empty')
            options=(
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel pause')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel unpause')
            options=(
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq nodes')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq lookup')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics'
            )
            ;;
        'nsq ping')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq info')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq tombstone')
            options=(
                '-y,--yes' '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '@nodes'
            )
            ;;
        'nsq drain')
            options=(
                '--to=' '--allow-repeats' '-y,--yes' '--dry-run' '--json' '-P,--profile=@profiles'
                '--no-profile' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level='
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls'
                '*--tls-pin-sha256=' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '@nodes'
            )
            ;;
        'nsq config')
            commands=(
                'show' 'path' 'get' 'set'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq config show')
            options=(
                '--origin' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            ;;
        'nsq config path')
            options=(
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            ;;
        'nsq config get')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                ''
            )
            ;;
        'nsq config set')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never'
                '--debug' '-h,--help'
            )
            arguments=(
                '' ''
            )
            ;;
        'nsq spark')
            commands=(
                'ingest' 'compact' 'report' 'replay' 'doctor' 'sql'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq spark ingest')
            options=(
                '-o,--output=@dir' '--checkpoint=@dir' '--format=parquet|delta' '-t,--topic=@topics'
                '-c,--channel=@channels' '--once' '--for=' '--trigger=' '--max-rows-per-trigger='
                '--spool-dir=@dir' '--raw' '--work-dir=@dir' '--skip-damaged' '--create'
                '--metrics-file=@file' '--json' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles' '--no-profile'
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '@dir'
            )
            ;;
        'nsq spark compact')
            options=(
                '-o,--output=@dir' '--format=parquet|delta' '*-t,--topic=@topics' '--day='
                '--until-day=' '--grace=' '--open-days' '--work-dir=@dir' '--skip-damaged'
                '--delete-archives' '--dry-run' '-y,--yes' '-d,--delimiter=' '--json' '--master='
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '@dir'
            )
            ;;
        'nsq spark report')
            options=(
                '--by=hour|day' '*-t,--topic=@topics' '--since=' '--until=' '--gap=' '--html=@file'
                '-d,--delimiter=' '--skip-damaged' '--damage-dir=@dir'
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '--master='
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq spark replay')
            options=(
                '*-t,--topic=@topics' '--since=' '--until=' '--where=' '-d,--delimiter=' '--rate='
                '--retry-timeout=' '--retry-unknown' '--ledger=@dir' '--dead-letters=@dir'
                '--dry-run' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json'
                '*--nsqd-tcp-address=' '-P,--profile=@profiles' '--no-profile'
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--master='
                '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq spark doctor')
            options=(
                '--shared-dir=@dir' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--no-profile' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '*--allow-announced='
                '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            ;;
        'nsq spark sql')
            options=(
                '*--archive=' '*--parquet=' '-f,--file=@file' '-n,--count=' '--skip-damaged'
                '--damage-dir=@dir' '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns='
                '--json' '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '' '*@file'
            )
            ;;
        'nsq bench')
            commands=(
                'pub' 'sub' 'e2e' 'compare'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq bench pub')
            options=(
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up='
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address='
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--html=@file'
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            ;;
        'nsq bench sub')
            options=(
                '-n,--count=' '--for=' '--create' '-t,--topic=@topics' '--size=' '--connections='
                '--embedded' '*--nsqd-tcp-address=' '*--nsqd-http-address=' '-P,--profile=@profiles'
                '--no-profile' '--max-in-flight=' '*--consumer-opt=@options'
                '*--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level='
                '--auth-secret-file=@file' '--auth-requires-tls,--no-auth-requires-tls'
                '*--tls-pin-sha256=' '--html=@file' '-o,--output=table|wide|tsv|csv|json|jsonl'
                '--columns=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            ;;
        'nsq bench e2e')
            options=(
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--create'
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address='
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--no-profile' '--max-in-flight='
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file'
                '--auth-requires-tls,--no-auth-requires-tls' '*--tls-pin-sha256=' '--html=@file'
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            ;;
        'nsq bench compare')
            options=(
                '--rounds=' '-n,--count=' '--for=' '*--nsqd-tcp-address=' '*--nsqd-http-address='
                '-P,--profile=@profiles' '--no-profile' '--html=@file'
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '' ''
            )
            ;;
        'nsq demo')
            options=(
                '--spark,--no-spark' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            ;;
        'nsq nsqd')
            options=(
                '*-auth-http-address=' '-broadcast-address=' '-broadcast-http-port='
                '-broadcast-tcp-port=' '-config=@file' '-data-path=@dir' '-dead-letter-topic='
                '-deflate?=true|false' '-durable?=true|false' '*-e2e-processing-latency-percentile='
                '-e2e-processing-latency-window-time=' '-http-address='
                '-http-client-connect-timeout=' '-http-client-request-timeout=' '-https-address='
                '-log-level=debug|info|warn|error|fatal' '-log-prefix=' '*-lookupd-tcp-address='
                '-max-attempts=' '-max-body-size=' '-max-bytes-per-file=' '-max-channel-consumers='
                '-max-deflate-level=' '-max-depth=' '-max-heartbeat-interval=' '-max-msg-size='
                '-max-msg-timeout=' '-max-output-buffer-size=' '-max-output-buffer-timeout='
                '-max-queue-bytes=' '-max-rdy-count=' '-max-req-timeout=' '-mem-queue-size='
                '-min-disk-free=' '-min-output-buffer-timeout=' '-msg-timeout=' '-node-id='
                '-output-buffer-timeout=' '-overflow-policy=' '-queue-scan-selection-count='
                '-queue-scan-worker-pool-max=' '-recover-only?=true|false' '-snappy?=true|false'
                '-statsd-address=' '-statsd-exclude-ephemeral?=true|false' '-statsd-interval='
                '-statsd-mem-stats?=true|false' '-statsd-prefix=' '-statsd-udp-packet-size='
                '-sync-every=' '-sync-timeout=' '-tcp-address=' '-tls-cert=@file'
                '-tls-client-auth-policy=require|require-verify' '-tls-key=@file'
                '-tls-min-version=tls1.2|tls1.3' '-tls-required?=true|false|tcp-https'
                '-tls-root-ca-file=@file' '-verbose?=true|false' '-version?=true|false'
                '-worker-id?=true|false'
            )
            has_go_flags=1
            ;;
        'nsq nsqlookupd')
            options=(
                '-broadcast-address=' '-config=@file' '-http-address=' '-inactive-producer-timeout='
                '-log-level=debug|info|warn|error|fatal' '-log-prefix=' '-tcp-address='
                '-tombstone-lifetime=' '-verbose?=true|false' '-version?=true|false'
            )
            has_go_flags=1
            ;;
        'nsq options')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            ;;
        'nsq profile')
            commands=(
                'ls' 'use' 'show'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq profile ls')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            ;;
        'nsq profile use')
            options=(
                '--none' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--color=auto|always|never' '--debug' '-h,--help'
            )
            arguments=(
                '@profiles'
            )
            ;;
        'nsq profile show')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '@profiles'
            )
            ;;
        'nsq schema')
            options=(
                '-o,--output=table|wide|tsv|csv|json|jsonl' '--columns=' '--json' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--color=auto|always|never' '--debug'
                '-h,--help'
            )
            arguments=(
                '*'
            )
            ;;
        'nsq compat')
            options=(
                '-h,--help'
            )
            arguments=(
                '' '' ''
            )
            ;;
        'nsq completion')
            options=(
                '-h,--help'
            )
            arguments=(
                'bash|zsh|fish'
            )
            ;;
        *) return 1 ;;
    esac
}

complete -F _nsq nsq
