"""Writes the prompts for `kvtide draft train`: templates, filled with words, in a seeded order.

    python examples/draft_prompts/compose.py FOLDER
    python examples/draft_prompts/compose.py FOLDER --prompts 12000

The first writes what is in this folder, the second as many prompts for training as asked for.
A template's `{name}` stands for a line of `words/NAME.txt`. Held-out prompts share no template and
no topic with those for training. A summary's text is made up of sentences about an invented event.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

SEED = 22
PROMPTS = 480
PARTS = {"chat": 0.6, "code": 0.25, "summary": 0.15}
"""Of the prompts for training."""
HELD_OUT = 30
"""Prompts of each kind."""

CHAT = (
    "What is {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Give me three tips about {topic}.",
    "Why do people care about {topic}?",
    "Write a short paragraph about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "How do I get started with {topic}?",
    "Tell me something surprising about {topic}.",
    "Describe {topic} in two sentences.",
    "Write a friendly email to a colleague about {topic}.",
    "How does {topic} work?",
    "Make a list of five questions that a beginner has about {topic}.",
    "I have half an hour every day for {topic}. What should I do with it?",
    "What mistakes are common with {topic}, and how can I avoid them?",
    "Write a short story in which {topic} plays a part.",
    "Tell me about {topic}.",
    "What is the history of {topic}?",
    "Write a {quality} poem about {topic}.",
    "What should everybody know about {topic}?",
    "Is {topic} important? Why?",
    "List ten facts about {topic}.",
    "Write an outline for an essay on {topic}.",
    "Write the introduction of a blog post about {topic}.",
    "How has {topic} changed over time?",
    "What questions about {topic} are still open?",
    "Write a slogan for a shop that is about {topic}.",
    "Write a {quality} dialogue between two friends about {topic}.",
    "Explain the most important terms around {topic}.",
    "Give me an example of {topic} in daily life.",
    "How would you teach {topic} to a class of teenagers?",
    "What do {topic} and {topic} have in common?",
    "What is the difference between {topic} and {topic}?",
    "Write a tweet about {topic}.",
    "Write a quiz with four questions about {topic}, with answers.",
    "Can you recommend books about {topic}?",
    "What does a {role} have to know about {topic}?",
    "What is the capital of {country}, and what is it known for?",
    "Tell me about the food of {country}.",
    "Plan a trip of five days to {country}.",
    "What is the climate like in {country}?",
    "Describe a typical day of a family in {country}.",
    "What languages do people speak in {country}?",
    "Compare {country} and {country}.",
    "What is a polite way to greet people in {country}?",
    "Who was {person}?",
    "Why is {person} famous?",
    "Write a short biography of {person}.",
    "What would {person} say about {topic}?",
    "Imagine an interview with {person}. Write it down.",
    "What can we learn from {person}?",
    "How do I make {dish}?",
    "Give me a recipe for {dish}.",
    "What goes well with {dish}?",
    "I want to cook {dish} for {number} people. What do I need?",
    "Write a shopping list for {dish}.",
    "What does a {role} do all day?",
    "What skills does a {role} need?",
    "Write a {quality} job advertisement for a {role}.",
    "Write a letter from a {role} to a {role}.",
    "Pretend that you are a {role}, and introduce yourself.",
    "Write a {quality} speech that a {role} gives at a party.",
    "My {relation} {problem}. What should I do?",
    "My {relation} {problem}. Write a message to them.",
    "My {relation} {problem}. How do I bring it up without a quarrel?",
    "I have a {relation} who {problem}, and it bothers me. Give me advice.",
    "Write a story about {thing} that takes place in {place}.",
    "Write a {quality} tale of {thing}.",
    "Describe {place} in the morning and in the evening.",
    "Write the first paragraph of a novel about {thing}.",
    "Invent a title for a film about {thing}, and say what happens in it.",
    "What could one find in {place}?",
    "A {role} comes to {place} and finds {thing}. What happens next?",
    "I buy {number} {item} for {number} coins each. How much do I pay? Explain it.",
    "There are {number} {item} in a box, and I take {number} of them away. How many are left?",
    "{number} children share {number} {item}. How many does each of them get?",
    "Give me synonyms of the word '{quality}', and use each in a sentence.",
    "Hello! I am a {role} from {country}. What can you help me with?",
    "Rewrite this sentence in a {quality} way: 'My {relation} {problem}.'",
    "Correct this sentence: 'He go to {place} and he see {thing} yesterday.'",
    "Translate into French: 'The {role} eats {dish}.'",
    "Translate into Spanish: 'My {relation} likes {topic}.'",
    "Write three sentences that begin with 'If I were a {role}'.",
    "Classify these words as food, jobs or countries: {role}, {country}, {dish}.",
    "Thank you for your help with {topic}! Do you have one more piece of advice?",
)
CODE = (
    "Write a {language} function that {task}.",
    "Show me {language} code that {task}.",
    "Write a {language} function that {task}. Add a comment to every line.",
    "Write a Python function that {task}. Add a docstring and an example call.",
    "I need a small {language} script that {task}. Explain it step by step.",
    "Write a unit test in {language} for a function that {task}.",
    "Write a {language} program that {task}, and handle wrong input.",
    "I am new to {language}. How do I write code that {task}?",
    "Implement a class in {language} that {task}.",
    "What is {concept}?",
    "Explain {concept} with an example in {language}.",
    "When should I use {concept}?",
    "What is the difference between {concept} and {concept}?",
    "Give me pseudocode for an algorithm that {task}.",
    "Write SQL for an application that {task}.",
    "Which mistakes do beginners in {language} make with {concept}?",
    "What would a reviewer say about {language} code that {task}?",
)
SUMMARY = (
    "Summarize the following text in two sentences.\n{text}",
    "What are the main points of this text? Use a short list.\n{text}",
    "Summarize this for someone in a hurry:\n{text}",
    "Read the text and write a one-paragraph summary of it.\n{text}",
    "Give the text below a title and a summary of one sentence.\n{text}",
    "{text}\nSummarize the text.",
    "TL;DR of this, please:\n{text}",
    "{text}\nWho does what in this text?",
    "Explain the following text in simple words.\n{text}",
    "Rewrite the text as a {quality} letter to a friend.\n{text}",
    "List the numbers in this text, and say what they stand for.\n{text}",
    "{text}\nWhat is good and what is bad about it?",
    "What will happen next, after this?\n{text}",
)
FIRST_FACTS = (
    "Last spring, {who} of {place} decided to open {what} at {where}.",
    "The idea for {what} came from {who}, who had waited for it for {years} years.",
)

HELD_OUT_CHAT = (
    "My friend says that {hobby} is a waste of time. What would you answer?",
    "Which alternatives to {hobby} are there for rainy afternoons?",
    "Plan a weekend around {hobby}.",
    "Somebody gave me a voucher for {hobby}. Shall I use it?",
    "Convince a sceptic that {hobby} is fun.",
    "What equipment and how much money does {hobby} take?",
)
HELD_OUT_HOBBIES = (
    "learning to juggle", "collecting stamps", "a pottery course", "geocaching", "origami",
    "archery", "fencing lessons", "puppet theatre", "escape rooms", "bookbinding",
)  # fmt: skip
HELD_OUT_CODE = (
    "How would you write a Rust function that {job}?",
    "My Python program has to do the following: it {job}. Please write it, with type hints.",
    "Write a bash one-liner that {job}, and explain each part.",
)
HELD_OUT_JOBS = (
    "counts the lines of a file that contain a given word",
    "finds the two closest numbers of a list",
    "turns seconds into hours, minutes and seconds",
    "lists the ten most frequent words of a text",
    "checks that brackets are balanced",
    "interleaves two lists",
    "finds the longest run of equal elements",
    "computes the checksum of a credit card number",
    "wraps a paragraph at sixty columns",
    "turns an RGB colour into hexadecimal digits",
)  # fmt: skip
HELD_OUT_SUMMARY = (
    "Here is a notice from a newspaper.\n{text}\nIn short, what happened?",
    "{text}\nTell me the key facts of the passage above in at most three sentences.",
    "Shorten this report to a headline and one line:\n{text}",
)
HELD_OUT_EVENTS = (
    "the mill of Oster; a bakery with a café; the grain store; a young couple",
    "the theatre of Quill Lane; a costume exchange; the cellar; the actors",
    "the airfield of Kestrel Hill; a school for gliding; hangar four; retired pilots",
    "the monastery of Vell; a seed bank; the stone barn; the gardeners",
    "the ferry company of Lake Moss; a floating cinema; its oldest boat; the captain",
)
HELD_OUT_FIRST_FACTS = (
    "Since Monday there has been {what} in {place}.",
    "It is run by {who}, who rent {where} for a symbolic price.",
)
HELD_OUT_FACTS = (
    "Nobody was hurt when a pipe burst during the rehearsal, but {weeks} boxes of papers got wet.",
    "The mayor cut a ribbon and spoke for {years} minutes, mostly about taxes.",
    "Tickets for the whole season were gone after {volunteers} hours.",
    "An engineer had warned that the floor might not carry {visitors} kilograms.",
    "Critics call the project a toy; a petition against it has {cost} signatures.",
    "The founders hope to pay their loan back when {percent} members have joined.",
)

_SLOT = re.compile(r"\{(\w+)\}")
Words = Mapping[str, Sequence[str]]


def words() -> dict[str, list[str]]:
    """The lines of every file of words, by its name."""
    files = sorted((Path(__file__).parent / "words").glob("*.txt"))
    return {file.stem: file.read_text("utf-8").splitlines() for file in files}


def passage(
    rng: random.Random, event: str, first_facts: Sequence[str], facts: Sequence[str]
) -> str:
    """Some sentences about an event, the first ones always."""
    place, what, where, who = event.split("; ")
    numbers = {
        "years": rng.randint(3, 20),
        "cost": rng.randint(20, 900),
        "visitors": rng.randint(300, 9000),
        "percent": rng.randint(55, 95),
        "volunteers": rng.randint(5, 60),
        "weeks": rng.randint(2, 12),
    }
    chosen = [*first_facts, *rng.sample(facts, 4)]
    sentences = (
        one.format(place=place, what=what, where=where, who=who, **numbers) for one in chosen
    )
    return " ".join(one[0].upper() + one[1:] for one in sentences)


def filled(rng: random.Random, template: str, given: Words) -> str:
    """A word for every slot; two slots of one name get different ones."""
    used: set[str] = set()

    def word(slot: re.Match[str]) -> str:
        name = slot[1]
        if name == "number":
            return str(rng.randint(2, 40))
        chosen = rng.choice([one for one in given[name] if one not in used])
        used.add(chosen)
        return chosen

    return _SLOT.sub(word, template)


def composed(rng: random.Random, templates: Sequence[str], given: Words, count: int) -> list[str]:
    """So many different prompts, every template about equally often, in random order."""
    found: dict[str, None] = {}
    tries = 0
    while len(found) < count and tries < 50 * count:
        found[filled(rng, templates[tries % len(templates)], given)] = None
        tries += 1
    assert len(found) == count, f"{count} different prompts; give it more words"
    prompts = list(found)
    rng.shuffle(prompts)
    return prompts


def summaries(
    rng: random.Random,
    templates: Sequence[str],
    given: Words,
    first_facts: Sequence[str],
    facts: Sequence[str],
    count: int,
) -> list[str]:
    """Every event about equally often, each time with other sentences."""
    events = given["event"]
    found = []
    for number in range(count):
        text = passage(rng, events[number % len(events)], first_facts, facts)
        template = templates[number // len(events) % len(templates)]
        found.append(filled(rng, template.replace("{text}", text), given))
    return found


def prompts(count: int = PROMPTS) -> dict[str, list[str]]:
    """The prompts of every file, by its path: `count` of them for training."""
    rng, given = random.Random(SEED), words()
    unseen = {"hobby": HELD_OUT_HOBBIES, "job": HELD_OUT_JOBS, "event": HELD_OUT_EVENTS}
    counts = {kind: round(part * count) for kind, part in PARTS.items()}
    held_out = {
        "held_out/chat": composed(rng, HELD_OUT_CHAT, unseen, HELD_OUT),
        "held_out/code": composed(rng, HELD_OUT_CODE, unseen, HELD_OUT),
        "held_out/summary": summaries(
            rng, HELD_OUT_SUMMARY, unseen, HELD_OUT_FIRST_FACTS, HELD_OUT_FACTS, HELD_OUT
        ),
    }
    training = {
        "train/chat": composed(rng, CHAT, given, counts["chat"]),
        "train/code": composed(rng, CODE, given, counts["code"]),
        "train/summary": summaries(
            rng, SUMMARY, given, FIRST_FACTS, given["fact"], counts["summary"]
        ),
    }
    return training | held_out


def write(folder: Path, count: int = PROMPTS) -> None:
    for name, found in prompts(count).items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(found) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="for training")
    args = parser.parse_args()
    write(args.folder, args.prompts)
