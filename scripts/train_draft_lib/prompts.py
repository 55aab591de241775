"""Training prompts from templates and word lists, and the hand-written ones for evaluation.

Everything is plain ASCII. A prompt is drawn by choosing a kind (stories, code, questions), one of
its templates and words for its fields; the same prompt is never drawn twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import words

HELD_OUT = Path(__file__).with_name("held_out.tsv")
KINDS = ("story", "code", "question")
FIELD = re.compile(r"\{(\w+)\}")

STORIES = (
    "Write a {genre} story about {who} {place}.",
    "Write a short story about {who} and {thing}.",
    "Tell me a {genre} story about {who} who finds {thing}.",
    "Tell me a story about {who} {place} and {thing}.",
    "Write a story about {theme}.",
    "Write a {genre} story about {theme} and {who}.",
    "Write the beginning of a {genre} novel about {who} {place}.",
    "Continue this story: {name} was walking home when {name2} gave her {thing}.",
    "Continue this story: Once upon a time there was {who} who lived {place}.",
    "Continue the story. {name} opened the door and saw {thing}.",
    "Write a dialogue between {who} and {who2} about {thing}.",
    "Write a conversation between {name} and {name2} {place}.",
    "Write a poem about {theme}.",
    "Write a poem about {who} {place}.",
    "Write a {genre} poem about {thing}.",
    "Describe a day in the life of {who} {place}.",
    "Write a fable about {who} and {who2}.",
    "Create a character named {name} who lives {place} and describe them.",
    "Write a scene {place} where {name} meets {who}.",
    "Write a letter from {name} to {name2} about {thing}.",
    "Write a diary entry by {who} {place}.",
    "Write three paragraphs about {who} and {thing}.",
    "Describe a place: {name} is {place} and finds {thing}.",
    "I need a {genre} story for {reader}. It should have {who} and {thing}.",
    "Give me a plot for a {genre} film about {who} {place}.",
    "Make up a legend about {thing}.",
    "Write a {genre} tale in which {who} learns about {theme}.",
    "Once there was {who} {place}. What happened next?",
)
CODE = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}.",
    "Write code in {language} that {task}.",
    "Show me {language} code that {task}.",
    "How do I write a {language} function that {task}?",
    "Give me an example of {language} code that {task} and explain it.",
    "Implement a function in {language} that {task}. Add comments.",
    "Write a {language} script that {task} and prints the result.",
    "Write a {language} function that {task}, then write a test for it.",
    "I am learning {language}. Show me a program that {task}.",
    "Explain {concept} in {language} with an example.",
    "What are {concept} in {language}?",
    "How do {concept} work in {language}?",
    "Give me a short tutorial about {concept} in {language}.",
    "Show an example of {concept} in {language}.",
    "What is the difference between {concept} and {concept2} in {language}?",
    "Write a {language} class named {name}Manager with three methods for {objects}.",
    "Write a {language} example that uses {concept} and {concept2}.",
    "Write a {language} function that takes a list of {objects} and {task}.",
    "Please write {language} code: it {task}. Then it {task2}.",
)
QUESTIONS = (
    "What is {topic}?",
    "Explain {topic}.",
    "Explain {topic} to {reader}.",
    "Tell me about {topic}.",
    "How does {topic} work?",
    "Why is {topic} important?",
    "What are the most important facts about {topic}?",
    "Give me a short summary of {topic}.",
    "Write a paragraph about {topic}.",
    "Write an essay about {topic}.",
    "What is the history of {topic}?",
    "What are the advantages and disadvantages of {topic}?",
    "How are {topic} and {topic2} related?",
    "Compare {topic} and {topic2}.",
    "What is the difference between {topic} and {topic2}?",
    "What should {reader} know about {topic}?",
    "Who discovered or invented {topic}?",
    "Describe {topic} in simple words.",
    "Give three examples of {topic} in everyday life.",
    "What are common misconceptions about {topic}?",
    "Write five quiz questions about {topic} with answers.",
    "Write a short article about {topic} for {reader}.",
    "I have to give a talk about {topic}. What should I say?",
    "How do I {do}?",
    "How can I {do}? Give me step by step instructions.",
    "What do I need to {do}?",
    "Give me some tips on how to {do}.",
    "What are common mistakes when people try to {do}?",
    "I want to {do} but I am a beginner. Where do I start?",
    "Write a guide for {reader}: how to {do}.",
    "Explain to {reader} how to {do}.",
    "What is the best way to {do} and why?",
    "List {n} {list}.",
    "Give me {n} {list} for {reader}.",
    "Make a list of {list} and describe each one.",
    "Name {n} {list} and explain why they matter.",
    "Can you suggest {n} {list}?",
    "Rewrite this sentence more formally: {sentence}",
    "Rewrite this sentence in the past tense: {sentence}",
    "Correct the grammar: {sentence}",
    "Make this sentence shorter: {sentence}",
    "Make this sentence more interesting: {sentence}",
    "Summarize this text: {sentence} {sentence2} {sentence3}",
    "Write an email in which you say that {sentence}",
    "{name} has {a} {objects} and buys {b} more. How many {objects} does {name} have?",
    "{name} has {a} {objects} and gives {b} to {name2}. How many are left?",
    "A box holds {b} {objects}. How many {objects} are in {a} boxes?",
    "If one of the {objects} costs {b} dollars, how much do {a} of them cost? Explain your steps.",
    "What is {a} plus {b}?",
    "What is {a} times {b}? Show the steps.",
    "A train travels {a} miles in {b} hours. What is its speed?",
    "What percentage is {b} of {a}?",
)
TEMPLATES = {"story": STORIES, "code": CODE, "question": QUESTIONS}

Draw = Callable[[random.Random], str]


def _one(of: Sequence[str]) -> Draw:
    return lambda rng: rng.choice(of)


def _sentence(rng: random.Random) -> str:
    text = f"{rng.choice(words.SUBJECTS)} {rng.choice(words.VERBS)} {rng.choice(words.ENDINGS)}."
    return text[0].upper() + text[1:]


FIELDS: dict[str, Draw] = {
    "genre": _one(words.GENRES),
    "who": _one(words.PEOPLE),
    "place": _one(words.PLACES),
    "thing": _one(words.THINGS),
    "theme": _one(words.THEMES),
    "name": _one(words.NAMES),
    "reader": _one(words.JOBS),
    "language": _one(words.LANGUAGES),
    "task": _one(words.CODE_TASKS),
    "concept": _one(words.CONCEPTS),
    "objects": _one(words.OBJECTS),
    "topic": _one(words.TOPICS),
    "do": _one(words.TASKS),
    "list": _one(words.LISTS),
    "sentence": _sentence,
    "n": lambda rng: rng.choice(("three", "five", "ten", "5", "10", "7", "four", "six")),
    "a": lambda rng: str(rng.randint(3, 400)),
    "b": lambda rng: str(rng.randint(2, 60)),
}


def draw(kind: str, rng: random.Random) -> str:
    """One prompt. Fields of one name (``{topic}``, ``{topic2}``) get words of their own."""
    template = rng.choice(TEMPLATES[kind])
    chosen: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        field = found.group(1)
        if field not in chosen:
            chosen[field] = FIELDS[field.rstrip("23")](rng)
        return chosen[field]

    return FIELD.sub(value, template)


def training_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` different (kind, prompt), the kinds in turn."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    misses = 0
    while len(found) < count:
        kind = KINDS[(len(found) + misses) % len(KINDS)]
        prompt = draw(kind, rng)
        if prompt in found:
            misses += 1
            if misses > 20 * count:
                raise ValueError(f"the templates make fewer than {count} different prompts")
            continue
        found[prompt] = kind
    return [(kind, prompt) for prompt, kind in found.items()]


def held_out_prompts(path: Path = HELD_OUT) -> list[tuple[str, str, str]]:
    """(kind, topic, prompt) of the evaluation: the topic occurs in no word list, the wording around
    it in no template."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(kind, topic, prompt) for kind, topic, prompt in rows]
