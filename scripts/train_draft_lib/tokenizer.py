"""Chats as token ids: the target's own template and vocabulary.

Byte-level BPE vocabularies are split here, for plain ASCII text (which all prompts are). Others
are left to llama.cpp in a process of its own, because torch is loaded in this one.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from .source import UnfitTarget, Vocabulary

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
SPLITS: dict[str, tuple[str, ...]] = {"smollm": ("[0-9]", _WORDS), "gpt-2": (_WORDS,)}
"""By the vocabulary's ``pre``: regular expressions, each applied to what the one before left."""

_QUESTION = "What is asked?"


class ChatTokenizer:
    def __init__(self, vocabulary: Vocabulary, path: Path, python: str = sys.executable) -> None:
        self.vocabulary = vocabulary
        self.path = path
        self.python = python
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self.template = environment.from_string(vocabulary.template)
        self.ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        self.ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(vocabulary.merges)}
        controls = [
            t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == 3
        ]
        self.controls = re.compile("(" + "|".join(re.escape(t) for t in controls) + ")")
        self.letters = _byte_letters()
        self.known: dict[str, list[int]] = {}

    def render(self, prompt: str) -> str:
        tokens = {f"{n}_token": self.vocabulary.tokens[i] for n, i in self.vocabulary.ids.items()}
        chat = [{"role": "user", "content": prompt}]
        return self.template.render(messages=chat, add_generation_prompt=True, **tokens)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Chats of one question each, up to where the answer begins."""
        texts = [self.render(prompt) for prompt in prompts]
        if self.vocabulary.model == "gpt2" and self.vocabulary.pre in SPLITS:
            begin = [self.vocabulary.ids["bos"]] if self.vocabulary.add_bos else []
            return [begin + self._split(text) for text in texts]
        return self._by_llama(texts)

    def around(self) -> tuple[list[int], list[int]]:
        """What stands before a question and what between it and its answer."""
        before, after = self.render(_QUESTION).split(_QUESTION)
        if self.vocabulary.model == "gpt2" and self.vocabulary.pre in SPLITS:
            begin = [self.vocabulary.ids["bos"]] if self.vocabulary.add_bos else []
            return begin + self._split(before), self._split(after)
        begin_tokens, end_tokens = self._by_llama([before, after])
        return begin_tokens, end_tokens

    def _split(self, text: str) -> list[int]:
        if not text.isascii():
            raise UnfitTarget("its chat template holds other characters than ASCII")
        found: list[int] = []
        for part in self.controls.split(text):
            if part in self.ids and self.controls.fullmatch(part):
                found.append(self.ids[part])
                continue
            for word in _pieces(part, SPLITS[self.vocabulary.pre]):
                if word not in self.known:
                    self.known[word] = self._merge(word)
                found += self.known[word]
        return found

    def _merge(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            joined, index = [], 0
            while index < len(parts):
                if index + 1 < len(parts) and (parts[index], parts[index + 1]) == best:
                    joined.append(parts[index] + parts[index + 1])
                    index += 2
                else:
                    joined.append(parts[index])
                    index += 1
            parts = joined
        return [self.ids[part] for part in parts]

    def _by_llama(self, texts: Sequence[str]) -> list[list[int]]:
        command = [self.python, str(Path(__file__).with_name("llama_tokens.py")), str(self.path)]
        done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True)
        if done.returncode:
            raise UnfitTarget(
                f"its vocabulary ({self.vocabulary.model}, {self.vocabulary.pre}) is left to "
                f"llama-cpp-python, which {self.python} has not (name another by --llama-python)"
            )
        return list(json.loads(done.stdout))


def _pieces(text: str, expressions: Sequence[str]) -> list[str]:
    """Cut at each expression's matches in turn; what lies between matches stays a piece."""
    pieces = [text]
    for expression in expressions:
        cut: list[str] = []
        for piece in pieces:
            at = 0
            for match in re.finditer(expression, piece):
                cut += [piece[at : match.start()], match.group()]
                at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    return pieces


def _byte_letters() -> dict[int, str]:
    """The printable letter by which byte-level vocabularies write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters


def _refuse(message: str) -> None:
    raise UnfitTarget(f"its chat template refuses a single question: {message}")
