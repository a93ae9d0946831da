"""The completion script for bash.

`SCRIPT` is written by hand and contains no command names; `_nsq_describe`, which is rendered, lists
what each command takes, in the form of `words`. It runs in bash 3.2, which macOS has, and later: no
associative arrays, no mapfile, no ``${x,,}``.

Traps: bash splits words at ``=`` and ``:``; pieces without a space between them are joined again.
Candidates replace only what follows the last split. Names that come from the cluster are
never given to ``compgen -W``, which would expand ``$(...)`` in them.
"""

from __future__ import annotations

from dataclasses import fields

from nsqtools.cli.docs.tree import Page, cluster_options
from nsqtools.cli.docs.words import (
    HEADER,
    argument_word,
    in_columns,
    option_word,
    single_quoted,
    spelled,
)
from nsqtools.client.options import ClientOptions, option_name

SCRIPT = r"""
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
        CLUSTER_VALUES) cluster+=("$1" "$value") ;;
        CLUSTER_SWITCHES) cluster+=("$1") ;;
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
"""


def render_bash(root: Page) -> str:
    """The whole script."""
    cluster = cluster_options()
    script = SCRIPT.replace("CLUSTER_VALUES", " | ".join(spelled(cluster, with_value=True)))
    script = script.replace("CLUSTER_SWITCHES", " | ".join(spelled(cluster, with_value=False)))
    client_options = " ".join(f"{option_name(each)}=" for each in fields(ClientOptions))
    return "\n".join(
        [
            "# shellcheck shell=bash disable=SC2034 # variables are shared by the functions",
            f"# bash completion for nsq. {HEADER}",
            script,
            f"_nsq_client_options={single_quoted(client_options)}",
            "",
            "# What can follow the words of $1: commands, options, arguments.",
            "_nsq_describe() {",
            "    commands=() options=() arguments=() has_go_flags=''",
            "    case $1 in",
            *(line for page in root.walk() for line in _case(page)),
            "        *) return 1 ;;",
            "    esac",
            "}",
            "",
            "complete -F _nsq nsq",
            "",
        ]
    )


def _case(page: Page) -> list[str]:
    lines = [f"        {single_quoted(page.path)})"]
    words = {
        "commands": [command.words[-1] for command in page.commands],
        "options": [option_word(option) for option in page.options],
        "arguments": [argument_word(argument) for argument in page.arguments],
    }
    for name, values in words.items():
        if values:
            lines += [
                f"            {name}=(",
                *in_columns(map(single_quoted, values)),
                "            )",
            ]
    if page.has_go_flags:
        lines.append("            has_go_flags=1")
    return [*lines, "            ;;"]
