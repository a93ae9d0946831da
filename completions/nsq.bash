# shellcheck shell=bash
# bash completion for nsq, which says itself what can follow. Runs in bash 3.2, which macOS has.

_nsq() {
    local line kind='' nsq=${1/#\~\//$HOME/}
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $kind ]]; then COMPREPLY+=("$line"); else kind=$line; fi
    done < <("$nsq" __complete_line bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" \
        2>/dev/null </dev/null)
    case $kind in
        files*)
            compopt -o default 2>/dev/null ||
                IFS=$'\n' read -d '' -ra COMPREPLY < <(compgen -f -- "$2")
            ;;
        dirs*) compopt -o dirnames 2>/dev/null ;;
        nospace*) compopt -o nospace 2>/dev/null ;;
    esac
}

complete -F _nsq nsq
