"""Writes the prompts for `kvtide draft train`: templates times topics, in a seeded order.

    python examples/draft_prompts/compose.py examples/draft_prompts

Held-out prompts share no template and no topic with those for training. A summary's text is made up
of sentences about an invented event.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

SEED = 22
COUNTS = {"chat": 220, "code": 140, "summary": 120}
HELD_OUT_COUNT = 15

CHAT = (
    "What is {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Give me three tips about {topic}.",
    "Why do people care about {topic}?",
    "Write a short paragraph about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "How do I get started with {topic}?",
    "Tell me something surprising about {topic}.",
    "Write a friendly email to a colleague about {topic}.",
    "Make a list of five questions that a beginner has about {topic}.",
    "I have half an hour every day for {topic}. What should I do with it?",
    "Describe {topic} in two sentences.",
    "What mistakes are common with {topic}, and how can I avoid them?",
    "Write a short story in which {topic} plays a part.",
)
CHAT_TOPICS = (
    "growing tomatoes", "learning the guitar", "the water cycle", "budgeting", "public libraries",
    "solar panels", "baking bread", "the history of paper", "morning runs", "keeping a diary",
    "good sleep", "the moon", "recycling glass", "learning a second language", "chess openings",
    "bicycle repair", "volcanoes", "coffee brewing", "meditation", "writing a CV",
    "working from home", "birdwatching", "the human heart", "planning a trip by train",
    "photographing landscapes", "a vegetarian diet", "neighbourhood gardens", "the printing press",
    "electric cars", "swimming for beginners", "lighthouses", "reading to children",
    "making new friends in a new city", "the Roman roads", "honey bees", "saving water at home",
    "public speaking", "clouds", "knitting", "first aid", "the invention of the telephone",
    "houseplants", "tea ceremonies", "mountain hiking", "the stock market", "time zones",
)  # fmt: skip
CODE = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}. Add a docstring and an example call.",
    "Show me JavaScript code that {task}.",
    "Implement a function in C that {task}.",
    "I need a small Python script that {task}. Explain it step by step.",
    "Write a unit test in Python for a function that {task}.",
    "Write a Java method that {task}.",
)
CODE_TASKS = (
    "reverses a string", "sums the even numbers of a list", "counts the words in a text",
    "checks whether a number is prime", "computes the factorial of n",
    "finds the largest element of an array", "removes duplicates from a list",
    "sorts a list of names by length", "converts Celsius to Fahrenheit",
    "reads a CSV file and prints its columns", "merges two sorted lists",
    "computes the first n Fibonacci numbers", "checks whether two strings are anagrams",
    "counts how often each letter occurs", "transposes a matrix", "finds the median of numbers",
    "flattens a nested list", "validates an email address", "generates a random password",
    "computes the greatest common divisor of two numbers", "searches a sorted array by halving",
    "prints a multiplication table", "rotates a list by k places", "implements a stack with a list",
    "finds all files with a given suffix in a folder", "parses a date such as 2024-05-17",
    "computes the average of each row of a table", "splits a list into chunks of equal size",
)  # fmt: skip
SUMMARY = (
    "Summarize the following text in two sentences.\n{text}",
    "What are the main points of this text? Use a short list.\n{text}",
    "Summarize this for someone in a hurry:\n{text}",
    "Read the text and write a one-paragraph summary of it.\n{text}",
    "Give the text below a title and a summary of one sentence.\n{text}",
)
EVENTS = (
    ("the town of Marlow Bridge", "a new library", "the old post office", "the council"),
    ("the village of Eastfield", "a weekly farmers' market", "the station square", "two farmers"),
    ("the university of Norden", "a repair workshop for bicycles", "the north campus", "students"),
    ("the harbour of Port Sella", "a museum of ships", "a former warehouse", "a group of sailors"),
    ("the school in Linden Street", "a garden on its roof", "the east wing", "the parents"),
    ("the city of Carrow", "a tram line", "the river bank", "the transport office"),
    ("the island of Brenn", "a wind park", "the southern cliffs", "the islanders"),
    ("the hospital of Saint Aven", "a music room", "the ground floor", "the nurses"),
    ("the valley of Torre", "a cycling path", "the closed railway", "three villages"),
    ("the company Halden Tools", "a day nursery", "the old canteen", "the workers' council"),
    ("the suburb of Greywater", "a swimming pool", "the site of a brewery", "the sports club"),
    ("the observatory of Mount Ilse", "evening tours", "the small dome", "the astronomers"),
)
FACTS = (
    "Last spring, {who} of {place} decided to open {what} at {where}.",
    "The idea for {what} came from {who}, who had waited for it for {years} years.",
    "The work cost {cost} thousand, of which donors paid about a third.",
    "In the first month, {visitors} visitors came, far more than had been expected.",
    "Some residents complained about the noise, and the opening hours were shortened.",
    "A survey in autumn showed that {percent} percent of the people were content with it.",
    "{volunteers} volunteers help there every week, most of them retired.",
    "Next year, it is to be made larger, if the money for that can be found.",
    "Bad weather delayed the work by {weeks} weeks, and a wall had to be built again.",
    "Schools from the whole region have booked visits until the summer.",
)

HELD_OUT_CHAT = (
    "My friend says that {topic} is a waste of time. What would you answer?",
    "Compare {topic} with the alternatives.",
    "Plan a weekend around {topic}.",
)
HELD_OUT_CHAT_TOPICS = (
    "learning to juggle", "collecting stamps", "a visit to a cheese dairy", "night trains",
    "building model aeroplanes",
)  # fmt: skip
HELD_OUT_CODE = (
    "How would you write a Rust function that {task}?",
    "My Python program has to do the following: it {task}. Please write it, with type hints.",
    "Write a bash one-liner that {task}, and explain each part.",
)
HELD_OUT_TASKS = (
    "counts the lines of a file that contain a given word",
    "finds the two closest numbers of a list",
    "turns seconds into hours, minutes and seconds",
    "lists the ten most frequent words of a text",
    "checks that brackets are balanced",
)  # fmt: skip
HELD_OUT_SUMMARY = (
    "Here is a notice from a newspaper.\n{text}\nIn short, what happened?",
    "{text}\nTell me the key facts of the passage above in at most three sentences.",
    "Shorten this report to a headline and one line:\n{text}",
)
HELD_OUT_EVENTS = (
    ("the mill of Oster", "a bakery with a café", "the grain store", "a young couple"),
    ("the theatre of Quill Lane", "a costume exchange", "the cellar", "the actors"),
    ("the airfield of Kestrel Hill", "a school for gliding", "hangar four", "retired pilots"),
    ("the monastery of Vell", "a seed bank", "the stone barn", "the gardeners"),
    ("the ferry company of Lake Moss", "a floating cinema", "its oldest boat", "the captain"),
)
HELD_OUT_FACTS = (
    "Since Monday there has been {what} in {place}.",
    "It is run by {who}, who rent {where} for a symbolic price.",
    "Nobody was hurt when a pipe burst during the rehearsal, but {weeks} boxes of papers got wet.",
    "The mayor cut a ribbon and spoke for {years} minutes, mostly about taxes.",
    "Tickets for the whole season were gone after {volunteers} hours.",
    "An engineer had warned that the floor might not carry {visitors} kilograms.",
    "Critics call the project a toy; a petition against it has {cost} signatures.",
    "The founders hope to pay their loan back when {percent} members have joined.",
)


def passage(rng: random.Random, event: tuple[str, str, str, str], sentences: Sequence[str]) -> str:
    """Some sentences about an event, the first two always."""
    place, what, where, who = event
    numbers = {
        "years": rng.randint(3, 20),
        "cost": rng.randint(20, 900),
        "visitors": rng.randint(300, 9000),
        "percent": rng.randint(55, 95),
        "volunteers": rng.randint(5, 60),
        "weeks": rng.randint(2, 12),
    }
    chosen = [*sentences[:2], *rng.sample(sentences[2:], 4)]
    facts = (
        fact.format(place=place, what=what, where=where, who=who, **numbers) for fact in chosen
    )
    return " ".join(fact[0].upper() + fact[1:] for fact in facts)


def composed(
    rng: random.Random, templates: Sequence[str], name: str, topics: Sequence[str], count: int
) -> list[str]:
    """So many of all pairs of a template and a topic, in random order."""
    pairs = [template.replace(f"{{{name}}}", topic) for template in templates for topic in topics]
    return rng.sample(pairs, count)


def summaries(
    rng: random.Random,
    templates: Sequence[str],
    events: Sequence[tuple[str, str, str, str]],
    sentences: Sequence[str],
    count: int,
) -> list[str]:
    """Every event about equally often, each time with other sentences."""
    return [
        templates[number // len(events) % len(templates)].format(
            text=passage(rng, events[number % len(events)], sentences)
        )
        for number in range(count)
    ]


def prompts() -> dict[str, list[str]]:
    """The prompts of every file, by its path."""
    rng, count = random.Random(SEED), HELD_OUT_COUNT
    return {
        "train/chat": composed(rng, CHAT, "topic", CHAT_TOPICS, COUNTS["chat"]),
        "train/code": composed(rng, CODE, "task", CODE_TASKS, COUNTS["code"]),
        "train/summary": summaries(rng, SUMMARY, EVENTS, FACTS, COUNTS["summary"]),
        "held_out/chat": composed(rng, HELD_OUT_CHAT, "topic", HELD_OUT_CHAT_TOPICS, count),
        "held_out/code": composed(rng, HELD_OUT_CODE, "task", HELD_OUT_TASKS, count),
        "held_out/summary": summaries(
            rng, HELD_OUT_SUMMARY, HELD_OUT_EVENTS, HELD_OUT_FACTS, count
        ),
    }


def write(folder: Path) -> None:
    for name, found in prompts().items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(found) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
