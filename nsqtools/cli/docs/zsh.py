"""The completion script for zsh: a function a command, on zsh's own ``_arguments``.

``_arguments`` handles options (values after ``=`` or in the next word, joined letters, ``--``,
exclusions); only names from the cluster are found here, in ``_nsq_names``.

Traps: inside ``*::`` the words of the line begin with the subcommand, so the program's own word is
saved in ``nsq`` first. A help text is in brackets inside single quotes and has its own escapes.
"""

from __future__ import annotations

from dataclasses import fields

from nsqtools.cli.docs.tree import Argument, Option, Page, cluster_options
from nsqtools.cli.docs.values import Candidates, Value
from nsqtools.cli.docs.words import HEADER, single_quoted, spelled
from nsqtools.client.options import ClientOptions, option_name

# A leading space: called with exactly these words.
ACTIONS = {
    Candidates.ANYTHING: "",
    Candidates.FILE: "_files",
    Candidates.DIRECTORY: "_files -/",
    Candidates.TOPIC: " _nsq_names topics",
    Candidates.CHANNEL: " _nsq_names channels",
    Candidates.NODE: " _nsq_names nodes",
    Candidates.PROFILE: " _nsq_names profiles",
    Candidates.CLIENT_OPTION: "_nsq_client_options",
}

SCRIPT = r"""
# Ask nsq for names; it gives up after a second, and is silent when it knows none.
_nsq_names() {
  local kind=$1 word topic= index
  local -a cluster names
  for ((index = 2; index < CURRENT; index++)); do
    word=${(Q)words[index]}
    case $word in
      (CLUSTER_VALUES)
        ((++index < CURRENT)) && cluster+=($word ${(Q)words[index]}) ;;
      (CLUSTER_VALUES_WITHIN|CLUSTER_SWITCHES)
        cluster+=($word) ;;
      (-t|--topic) ((++index < CURRENT)) && topic=${(Q)words[index]} ;;
      (--topic=*) topic=${word#*=} ;;
      (-t?*) topic=${word#-t} ;;
    esac
  done
  if [[ $kind == channels ]]; then
    [[ -n $topic ]] || topic=${(Q)line[1]-}
    [[ -n $topic ]] && cluster+=(--topic ${topic##*=})
  fi
  compset -P '*='  # OLD=NEW
  names=(${(f)"$(${nsq/#\~\//$HOME/} __complete $kind $cluster 2>/dev/null </dev/null)"})
  _wanted $kind expl ${kind%s} compadd -a names
}

_nsq_client_options() {
  local -a names=(
CLIENT_OPTIONS
  )
  compset -P '*[=,]*' || _describe -t client-options 'client option' names -S =
}

# The daemons take a flag with one dash or two: read and offer all as the word at the cursor begins.
_nsq_dashes() {
  local index dashes=-
  if [[ $PREFIX == --* ]]; then
    dashes=--
    flags=(${${flags/#-/--}/#\*-/*--})
  fi
  for ((index = 2; index < CURRENT; index++)); do
    [[ $words[index] == -?* ]] && words[index]=$dashes${${words[index]#-}#-}
  done
}
"""

ENTRY = r"""
_nsq() {
  local nsq=${(Q)words[1]}
  _nsq_root
}

if [[ $funcstack[1] == _nsq ]]; then
  _nsq "$@"
else
  compdef _nsq nsq
fi
"""

OUTER = r"""  local curcontext=$curcontext state
  local -a line
  typeset -A opt_args
  _arguments -s -S -C \
"""

CHOOSE = r"""    ':command:->command' '*::argument:->argument'
  case $state in
    (command)
      local -a commands=(
COMMANDS
      )
      _describe -t commands 'nsq command' commands
      ;;
    (argument)
      case $line[1] in
BRANCHES
      esac
      ;;
  esac
"""


def render_zsh(root: Page) -> str:
    """The whole script."""
    cluster = cluster_options()
    valued = spelled(cluster, with_value=True)
    client_options = [
        "    " + single_quoted(f"{option_name(each)}:{_plain(each.metadata['help'])}")
        for each in fields(ClientOptions)
    ]
    script = (
        SCRIPT.replace("CLUSTER_VALUES_WITHIN", "|".join(_within(name) for name in valued))
        .replace("CLUSTER_VALUES", "|".join(valued))
        .replace("CLUSTER_SWITCHES", "|".join(spelled(cluster, with_value=False)))
        .replace("CLIENT_OPTIONS", "\n".join(client_options))
    )
    functions = "\n".join(_function(page) for page in root.walk())
    return f"#compdef nsq\n# zsh completion for nsq. {HEADER}\n{script}\n{functions}{ENTRY}"


def _within(name: str) -> str:
    """The pattern of a word that has the option's value in it."""
    return f"{name}=*" if name.startswith("--") else f"{name}?*"


def _function(page: Page) -> str:
    options = [spec for option in page.options for spec in _option(option)]
    if page.commands:
        commands = [
            f"        {single_quoted(f'{each.words[-1]}:{_plain(each.summary)}')}"
            for each in page.commands
        ]
        branches = [f"        ({each.words[-1]}) {_name(each)} ;;" for each in page.commands]
        body = OUTER + "".join(f"    {spec} \\\n" for spec in options)
        body += CHOOSE.replace("COMMANDS", "\n".join(commands)).replace(
            "BRANCHES", "\n".join(branches)
        )
    elif page.has_go_flags:
        flags = "\n".join(f"    {spec}" for spec in options)
        body = f"  local -a line flags=(\n{flags}\n  )\n  _nsq_dashes\n  _arguments $flags\n"
    else:
        specs = [*options, *map(_argument, page.arguments)]
        body = "  local -a line\n  _arguments -s -S \\\n"
        body += " \\\n".join(f"    {spec}" for spec in specs) + "\n"
    return f"{_name(page)}() {{\n{body}}}\n"


def _name(page: Page) -> str:
    return "_nsq_" + ("_".join(page.words[1:]) or "root").replace("-", "_")


def _option(option: Option) -> list[str]:
    """The specs of an option: all its spellings in one, ``--no-...`` in one more."""
    spellings = option.spellings
    exclusion = "*" if option.is_repeatable else f"({' '.join(spellings)})"
    if not option.is_repeatable and len(spellings) == 1:
        exclusion = ""
    specs = [_spec(option, option.names, exclusion, option.help)]
    if option.off_names:
        specs.append(_spec(option, option.off_names, exclusion, f"not: {option.help}"))
    return specs


def _spec(option: Option, names: tuple[str, ...], exclusion: str, help: str) -> str:
    marked = [name + _value_mark(option, name) for name in names]
    text = f"[{_escaped(help)}]" + (_value(option.value, option.value_is_optional))
    if len(marked) == 1:
        return single_quoted(exclusion + marked[0] + text)
    return f"{single_quoted(exclusion)}{{{','.join(marked)}}}{single_quoted(text)}"


def _value_mark(option: Option, name: str) -> str:
    """Where the value is: in the same word or the next, after = if the name is long."""
    if option.value is None:
        return ""
    if option.value_is_optional:
        return "=-"
    return "=" if len(name) > 2 else "+"


def _value(value: Value | None, is_optional: bool) -> str:
    if value is None:
        return ""
    action = ACTIONS.get(value.kind) or f"({' '.join(value.choices)})"
    action = " " if value.kind is Candidates.ANYTHING else action
    return f"{'::' if is_optional else ':'}{_escaped(value.metavar) or 'value'}:{action}"


def _argument(argument: Argument) -> str:
    return single_quoted(("*" if argument.is_repeatable else "") + _value(argument.value, False))


def _plain(text: str) -> str:
    """A text for ``_describe``, where a colon ends the name."""
    return text.replace("\\", "\\\\")


def _escaped(text: str) -> str:
    """A text inside a spec of ``_arguments``."""
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text
