"""The completion script for fish.

One function finds the candidates: a ``complete`` line for each option of each command, with a
condition, would be a thousand lines for fish to run at each key press. `SCRIPT` is written by hand;
``__nsq_describe``, which is rendered, lists what each command takes, in the form of `words`, with
its help texts.

Traps: the helpers share the variables of ``__nsq_complete`` (--no-scope-shadowing). ``set -e`` on
the first word is used for a slice, because ``[2..-1]`` of one word is that word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from nsqtools.cli.docs.tree import Page, cluster_options
from nsqtools.cli.docs.words import HEADER, argument_word, in_columns, option_word, spelled
from nsqtools.client.options import ClientOptions, option_name

SCRIPT = r"""
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
        case CLUSTER_VALUES
            set -a cluster $argv[1] $argv[2]
        case CLUSTER_SWITCHES
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
"""


def render_fish(root: Page) -> str:
    """The whole script."""
    cluster = cluster_options()
    script = SCRIPT.replace("CLUSTER_VALUES", " ".join(spelled(cluster, with_value=True)))
    script = script.replace("CLUSTER_SWITCHES", " ".join(spelled(cluster, with_value=False)))
    client_options = [
        f"{option_name(each)}=\t{each.metadata['help']}" for each in fields(ClientOptions)
    ]
    return "\n".join(
        [
            f"# fish completion for nsq. {HEADER}",
            script,
            "function __nsq_client_options",
            "    printf '%s\\t%s\\n' \\",
            " \\\n".join(
                "        " + " ".join(map(_quoted, each.split("\t"))) for each in client_options
            ),
            "end",
            "",
            "# What can follow the words of $argv[1]: commands, options, arguments.",
            "function __nsq_describe --no-scope-shadowing",
            "    set commands",
            "    set options",
            "    set arguments",
            "    switch $argv[1]",
            *(line for page in root.walk() for line in _case(page)),
            "        case '*'",
            "            return 1",
            "    end",
            "    return 0",
            "end",
            "",
            "complete -c nsq -f -a '(__nsq_complete)'",
            "",
        ]
    )


def _case(page: Page) -> list[str]:
    lines = [f"        case {_quoted(page.path)}"]
    lists = {
        "commands": [command.words[-1] for command in page.commands],
        "command_helps": [command.summary for command in page.commands],
        "options": [option_word(option) for option in page.options],
        "option_helps": [option.help for option in page.options],
        "arguments": [argument_word(argument) for argument in page.arguments],
    }
    for name, words in lists.items():
        if words:
            lines.append(_set(name, words))
    if page.has_go_flags:
        lines.append("            set has_go_flags yes")
    return lines


def _set(name: str, words: Iterable[str]) -> str:
    lines = [f"            set {name}", *in_columns(map(_quoted, words))]
    return " \\\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
