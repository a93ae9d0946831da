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
        --nsqd-http-address | --lookupd-http-address | --nsqd-tcp-address | --address-map | -P | --profile | --tls-ca-file | --tls-cert | --tls-key | --tls-min-version | --auth-secret-file | --timeout) cluster+=("$1" "$value") ;;
        --tls-insecure | --lookupd-authorization) cluster+=("$1") ;;
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
    local start=$1 each
    shift
    for each in "$@"; do
        [[ $each == "$start"* ]] && COMPREPLY+=("$prefix$each")
    done
}

_nsq_client_options='dial_timeout= read_timeout= write_timeout= local_addr= reconnect_base= reconnect_max= lookupd_poll_interval= lookupd_poll_jitter= lookupd_poll_timeout= lookupd_authorization= client_id= hostname= user_agent= topology_region= topology_zone= heartbeat_interval= sample_rate= output_buffer_size= output_buffer_timeout= msg_timeout= tls_v1= tls_root_ca_file= tls_cert= tls_key= tls_insecure_skip_verify= tls_min_version= snappy= deflate= deflate_level= auth_secret= max_in_flight= max_attempts= max_msg_size= default_requeue_delay= max_requeue_delay= backoff_strategy= backoff_multiplier= max_backoff_duration= low_rdy_idle_timeout= low_rdy_timeout= rdy_redistribute_interval= rdy_resend= drain_timeout= max_outstanding= publish_timeout= publish_max_msg_size= publish_max_body_size='

# What can follow the words of $1: commands, options, arguments.
_nsq_describe() {
    commands=() options=() arguments=() has_go_flags=''
    case $1 in
        'nsq')
            commands=(
                'tail' 'pub' 'peek' 'to-file' 'stat' 'archive' 'replay' 'top' 'topic' 'channel'
                'nodes' 'lookup' 'ping' 'info' 'tombstone' 'drain' 'config' 'spark' 'bench' 'demo'
                'nsqd' 'nsqlookupd' 'options' 'completion'
            )
            options=(
                '--version' '-h,--help'
            )
            ;;
        'nsq tail')
            options=(
                '*-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--exit-idle=' '--for='
                '--create' '--force' '--json' '-f,--format=' '--decode=utf8|hex|base64'
                '-d,--delimiter=' '--print-topic' '-g,--grep=' '-i,--ignore-case' '--invert'
                '--sample=' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles'
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq pub')
            options=(
                '-t,--topic=@topics' '*-m,--message=' '--format=raw|jsonl' '-d,--delimiter='
                '--rate=' '--defer=' '--mode=all|round-robin|failover' '--retry-timeout='
                '--retry-unknown' '--unsent-file=@file' '--json' '*--nsqd-tcp-address='
                '-P,--profile=@profiles' '*-X,--producer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq peek')
            options=(
                '-t,--topic=@topics' '-c,--channel=@channels' '-n,--count=' '--exit-idle=' '--json'
                '-f,--format=' '--decode=utf8|hex|base64' '-d,--delimiter=' '--print-topic'
                '*--nsqd-tcp-address=' '*--lookupd-http-address=' '*--nsqd-http-address='
                '*--address-map=' '-P,--profile=@profiles' '--max-in-flight='
                '*-X,--consumer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq to-file')
            options=(
                '*-t,--topic=@topics' '--topic-pattern=' '--topic-refresh=' '-c,--channel=@channels'
                '--on-file=' '--metrics-file=@file' '-n,--count=' '--until-empty' '--exit-idle='
                '--for=' '--exit-when-deleted' '--create' '--json' '--output-dir=@dir'
                '--work-dir=@dir' '--filename-format=' '--datetime-format=' '--partition-format='
                '--partition-by=arrival|message' '--utc' '--host-identifier=' '--file-mode='
                '--dir-mode=' '--format=jsonl|raw' '-d,--delimiter=' '--gzip' '--gzip-level='
                '--rotate-size=' '--rotate-text-size=' '--rotate-interval=' '--rotate-age='
                '--skip-empty-files,--no-skip-empty-files' '--sync-interval=' '--sync-bytes='
                '--sync-count=' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles'
                '--max-in-flight=' '*-X,--consumer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq stat')
            options=(
                '*-t,--topic=@topics' '*-c,--channel=@channels' '--show=queues|nodes|clients|memory'
                '*--filter='
                '--sort=topic|channel|node|depth|memory|disk|in_flight|deferred|ingress|egress|finish|requeue|requeued|timed_out|messages|clients|paused|e2e_ms'
                '--interval=' '-n,--count=' '--once' '--json' '--csv' '--prometheus' '--max-depth='
                '--max-requeue-rate=' '--min-clients=' '*--nsqd-http-address='
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map='
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
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
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive repair')
            options=(
                '-d,--delimiter=' '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive cat')
            options=(
                '--bodies' '-d,--delimiter=' '--since=' '--until=' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq archive info')
            options=(
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq replay')
            options=(
                '*-t,--topic=@topics' '--since=' '--until=' '-g,--grep=' '--dedupe'
                '-d,--delimiter=' '--rate=' '--speed=' '--mode=all|round-robin|failover'
                '--retry-timeout=' '--retry-unknown' '--checkpoint=@file' '--unsent-file=@file'
                '--dry-run' '--json' '*--nsqd-tcp-address=' '-P,--profile=@profiles'
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq top')
            options=(
                '*-t,--topic=@topics' '--interval=' '*--nsqd-http-address='
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map='
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
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
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic info')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics'
            )
            ;;
        'nsq topic create')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic delete')
            options=(
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic empty')
            options=(
                '--channels' '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address='
                '*--lookupd-http-address=' '*--nsqd-tcp-address=' '*--address-map='
                '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file'
                '--timeout=' '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic pause')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq topic unpause')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
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
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '*@topics'
            )
            ;;
        'nsq channel info')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '@channels'
            )
            ;;
        'nsq channel create')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel delete')
            options=(
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel empty')
            options=(
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel pause')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq channel unpause')
            options=(
                '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' '*@channels'
            )
            ;;
        'nsq nodes')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq lookup')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics'
            )
            ;;
        'nsq ping')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq info')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq tombstone')
            options=(
                '-y,--yes' '--dry-run' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '@topics' ''
            )
            ;;
        'nsq drain')
            options=(
                '--to=' '--allow-repeats' '-y,--yes' '--dry-run' '--json' '-P,--profile=@profiles'
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy'
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                ''
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
                '--origin' '--json' '*--nsqd-tcp-address=' '*--lookupd-http-address='
                '*--nsqd-http-address=' '*--address-map=' '-P,--profile=@profiles'
                '--max-in-flight=' '*--consumer-opt=@options' '*--producer-opt=@options'
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy'
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq config path')
            options=(
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq config get')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                ''
            )
            ;;
        'nsq config set')
            options=(
                '--json' '*--nsqd-http-address=' '*--lookupd-http-address=' '*--nsqd-tcp-address='
                '*--address-map=' '-P,--profile=@profiles' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
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
                '-o,--output=@dir' '--checkpoint=@dir' '-t,--topic=@topics' '-c,--channel=@channels'
                '--once' '--for=' '--trigger=' '--max-rows-per-trigger=' '--spool-dir=@dir' '--raw'
                '--work-dir=@dir' '--skip-damaged' '--create' '*--nsqd-tcp-address='
                '*--lookupd-http-address=' '*--nsqd-http-address=' '*--address-map='
                '-P,--profile=@profiles' '--max-in-flight=' '*-X,--consumer-opt=@options'
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy'
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '--master=' '--driver-memory='
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            arguments=(
                '@dir'
            )
            ;;
        'nsq spark compact')
            options=(
                '-o,--output=@dir' '*-t,--topic=@topics' '--day=' '--until-day=' '--grace='
                '--open-days' '--work-dir=@dir' '--skip-damaged' '--delete-archives' '--dry-run'
                '-y,--yes' '-d,--delimiter=' '--json' '--master=' '--driver-memory=' '*--conf='
                '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug'
                '-h,--help'
            )
            arguments=(
                '@dir'
            )
            ;;
        'nsq spark report')
            options=(
                '--by=hour|day' '*-t,--topic=@topics' '--since=' '--until=' '--gap=' '--html=@file'
                '--json' '-d,--delimiter=' '--skip-damaged' '--master=' '--driver-memory='
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq spark replay')
            options=(
                '*-t,--topic=@topics' '--since=' '--until=' '--where=' '-d,--delimiter=' '--rate='
                '--retry-timeout=' '--retry-unknown' '--ledger=@dir' '--dead-letters=@dir'
                '--dry-run' '--json' '*--nsqd-tcp-address=' '-P,--profile=@profiles'
                '*-X,--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file'
                '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '--master=' '--driver-memory='
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            arguments=(
                '*@file'
            )
            ;;
        'nsq spark doctor')
            options=(
                '--shared-dir=@dir' '--json' '*--nsqd-http-address=' '*--lookupd-http-address='
                '*--nsqd-tcp-address=' '*--address-map=' '-P,--profile=@profiles'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--auth-secret-file=@file' '--timeout='
                '--lookupd-authorization,--no-lookupd-authorization' '--master=' '--driver-memory='
                '*--conf=' '--spark-log=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            ;;
        'nsq spark sql')
            options=(
                '*--archive=' '*--parquet=' '-f,--file=@file' '-n,--count=' '--json'
                '--skip-damaged' '--master=' '--driver-memory=' '*--conf=' '--spark-log=@file'
                '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            arguments=(
                '' '*@file'
            )
            ;;
        'nsq bench')
            commands=(
                'pub' 'sub' 'e2e'
            )
            options=(
                '-h,--help'
            )
            ;;
        'nsq bench pub')
            options=(
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--json'
                '-t,--topic=@topics' '--size=' '--connections=' '--embedded' '*--nsqd-tcp-address='
                '*--nsqd-http-address=' '-P,--profile=@profiles' '--max-in-flight='
                '*--consumer-opt=@options' '*--producer-opt=@options' '--tls,--no-tls'
                '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file' '--tls-insecure'
                '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy' '--deflate,--no-deflate'
                '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose'
                '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq bench sub')
            options=(
                '-n,--count=' '--for=' '--create' '--json' '-t,--topic=@topics' '--size='
                '--connections=' '--embedded' '*--nsqd-tcp-address=' '*--nsqd-http-address='
                '-P,--profile=@profiles' '--max-in-flight=' '*--consumer-opt=@options'
                '*--producer-opt=@options' '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file'
                '--tls-key=@file' '--tls-insecure' '--tls-min-version=tls1.2|tls1.3'
                '--snappy,--no-snappy' '--deflate,--no-deflate' '--deflate-level='
                '--auth-secret-file=@file' '-q,--quiet' '*-v,--verbose' '--log-format=text|json'
                '--debug' '-h,--help'
            )
            ;;
        'nsq bench e2e')
            options=(
                '--batch=' '--window=' '--rate=' '-n,--count=' '--for=' '--warm-up=' '--create'
                '--json' '-t,--topic=@topics' '--size=' '--connections=' '--embedded'
                '*--nsqd-tcp-address=' '*--nsqd-http-address=' '-P,--profile=@profiles'
                '--max-in-flight=' '*--consumer-opt=@options' '*--producer-opt=@options'
                '--tls,--no-tls' '--tls-ca-file=@file' '--tls-cert=@file' '--tls-key=@file'
                '--tls-insecure' '--tls-min-version=tls1.2|tls1.3' '--snappy,--no-snappy'
                '--deflate,--no-deflate' '--deflate-level=' '--auth-secret-file=@file' '-q,--quiet'
                '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
            )
            ;;
        'nsq demo')
            options=(
                '--spark,--no-spark' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug'
                '-h,--help'
            )
            ;;
        'nsq nsqd')
            options=(
                '*-auth-http-address=' '-broadcast-address=' '-broadcast-http-port='
                '-broadcast-tcp-port=' '-config=@file' '-data-path=@dir' '-deflate?=true|false'
                '*-e2e-processing-latency-percentile=' '-e2e-processing-latency-window-time='
                '-http-address=' '-http-client-connect-timeout=' '-http-client-request-timeout='
                '-https-address=' '-log-level=debug|info|warn|error|fatal' '-log-prefix='
                '*-lookupd-tcp-address=' '-max-body-size=' '-max-bytes-per-file='
                '-max-channel-consumers=' '-max-deflate-level=' '-max-heartbeat-interval='
                '-max-msg-size=' '-max-msg-timeout=' '-max-output-buffer-size='
                '-max-output-buffer-timeout=' '-max-rdy-count=' '-max-req-timeout='
                '-mem-queue-size=' '-min-output-buffer-timeout=' '-msg-timeout=' '-node-id='
                '-output-buffer-timeout=' '-queue-scan-selection-count='
                '-queue-scan-worker-pool-max=' '-snappy?=true|false' '-statsd-address='
                '-statsd-exclude-ephemeral?=true|false' '-statsd-interval='
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
                '--json' '-q,--quiet' '*-v,--verbose' '--log-format=text|json' '--debug' '-h,--help'
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
