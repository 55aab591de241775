"""Writes scripts/completion/ from the command line's own table of options, for three shells.

``.venv/bin/python scripts/lib/completions.py``: run it after changing an option.

What is offered behind an option is what its values are: words, files (models and configurations by
their endings), folders, or nothing where only the operator can know. Options that are not available
yet are not offered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_trio.cli.option import Option
from dflash_trio.cli.option_table import OPTIONS

FOLDER = Path(__file__).resolve().parent.parent / "completion"
PROGRAMS = ("dflash-server", "dflash_server")
ORIGIN = "Made by scripts/lib/completions.py from the table of options: change it there."

_ENDINGS = {"model": "gguf", "draft": "gguf", "prefill-drafter": "gguf", "config": "toml"}
"""Options whose files end alike."""
_MORE_WORDS = {"draft": ("prompt-lookup",)}
"""Words that stand in the place of a file."""
_FILES, _FOLDERS = ("PATH", "FILE", "FILE.toml"), ("DIR", "DIR|off")

OFFERED: Sequence[Option] = [option for option in OPTIONS if option.available]


def scripts() -> Mapping[str, str]:
    """Every file's text by its name."""
    return {
        "dflash-server.bash": _bash(),
        "_dflash-server": _zsh(),
        "dflash-server.fish": _fish(),
    }


def _takes_file(option: Option) -> bool:
    return option.takes is not None and option.takes.metavar in _FILES


def _takes_folder(option: Option) -> bool:
    return option.takes is not None and option.takes.metavar in _FOLDERS


def _words(option: Option) -> tuple[str, ...]:
    if option.takes is None:
        return ()
    return option.takes.words + _MORE_WORDS.get(option.name, ())


# ------------------------------------------------------------------------------------- bash


def _bash() -> str:
    # What takes the same values is one case.
    flags_of: dict[str, list[str]] = {}
    for option in OFFERED:
        if option.takes is not None:
            flags_of.setdefault(_bash_offer(option), []).append(option.flag)
    cases = "\n".join(
        f"        {' | '.join(flags)})\n            {offer}\n            ;;"
        for offer, flags in flags_of.items()
    )
    flags = " ".join(option.flag for option in OFFERED)
    return f"""\
# bash completion for dflash-server.
# {ORIGIN}

_dflash_server_words() {{
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -W "$2" -- "$1")
}}

_dflash_server_folders() {{
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -d -- "$1")
}}

# Folders, and files with an ending.
_dflash_server_files() {{
    local name
    _dflash_server_folders "$1"
    while IFS= read -r name; do
        [[ -d $name ]] || COMPREPLY+=("$name")
    done < <(compgen -f -X "!*$2" -- "$1")
}}

_dflash_server() {{
    # Not COMP_WORDS: bash cuts those at = and at the colon of a device. (A blank ends a path.)
    local line=${{COMP_LINE:0:COMP_POINT}} word option start=""
    word=${{line##*[[:space:]]}}
    line=${{line%"$word"}}
    line=${{line%"${{line##*[![:space:]]}}"}}
    option=${{line##*[[:space:]]}}
    if [[ $word == --*=* ]]; then
        option=${{word%%=*}}
        word=${{word#*=}}
    fi
    # What is in front of a colon stands there already, and is not put there again.
    [[ $word == *:* && $COMP_WORDBREAKS == *:* ]] && start=${{word%"${{word##*:}}"}}
    COMPREPLY=()
    case $option in
{cases}
        *)
            if [[ $word == -* ]]; then
                _dflash_server_words "$word" "{flags}"
            else
                _dflash_server_files "$word" .gguf
            fi
            ;;
    esac
    COMPREPLY=("${{COMPREPLY[@]#"$start"}}")
}}

complete -F _dflash_server {" ".join(PROGRAMS)}
"""


def _bash_offer(option: Option) -> str:
    does = []
    if _words(option):
        does.append(f'_dflash_server_words "$word" "{" ".join(_words(option))}"')
    if _takes_file(option):
        ending = f".{_ENDINGS[option.name]}" if option.name in _ENDINGS else '""'
        does.append(f'_dflash_server_files "$word" {ending}')
    if _takes_folder(option):
        does.append('_dflash_server_folders "$word"')
    return "; ".join(does) or ":"


# -------------------------------------------------------------------------------------- zsh


def _zsh() -> str:
    specs = "\n".join(f"        {_zsh_spec(option)} \\" for option in OFFERED)
    return f"""\
#compdef {" ".join(PROGRAMS)}
# {ORIGIN}

_dflash_server() {{
    # Every option may come again in a later block.
    _arguments -S \\
{specs}
        '*:model:_files -g "*.gguf"'
}}

_dflash_server "$@"
"""


def _zsh_spec(option: Option) -> str:
    text = _zsh_text(option.help)
    if option.takes is None:
        return f"'*{option.flag}[{text}]'"
    name = _zsh_text(option.takes.metavar)
    words = " ".join(word.replace(":", r"\:") for word in _words(option))
    if _takes_folder(option):
        action = f'_alternative "w:word:({words})" "d:folder:_files -/"' if words else "_files -/"
    elif _takes_file(option):
        ending = _ENDINGS.get(option.name)
        action = f'_files -g "*.{ending}"' if ending else "_files"
        if words:
            action = f'_alternative "w:word:({words})" "f:file:{action.replace(chr(34), "")}"'
    else:
        action = f"({words})" if words else " "
    return f"'*{option.flag}=[{text}]:{name}:{action}'"


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text.replace("'", "'\\''")


# ------------------------------------------------------------------------------------- fish


def _fish() -> str:
    lines = [f"# fish completion for dflash-server.\n# {ORIGIN}\n"]
    for program in PROGRAMS:
        lines.append(f"complete -c {program} -f -a '(__fish_complete_suffix .gguf)'")
        lines += [_fish_line(program, option) for option in OFFERED]
    return "\n".join(lines) + "\n"


def _fish_line(program: str, option: Option) -> str:
    text = option.help.replace("\\", "\\\\").replace("'", "\\'")
    line = f"complete -c {program} -l {option.name} -d '{text}'"
    if option.takes is None:
        return line
    offered = list(_words(option))
    if _takes_folder(option):
        offered.append("(__fish_complete_directories)")
    elif _takes_file(option):
        ending = _ENDINGS.get(option.name)
        if ending is None:
            return f"{line} -r -F"
        offered.append(f"(__fish_complete_suffix .{ending})")
    return f"{line} -x -a '{' '.join(offered)}'" if offered else f"{line} -x"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in scripts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
