"""Traces in the recorded format, made up: conversations of which only whole blocks are shared."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

from kvtide.planner import traces
from kvtide.planner.traces import BLOCK_TOKENS, Trace


def conversations(file: Path, requests: int, talking: int = 60, seed: int = 0) -> Trace:
    """Users talk in turns behind one system prompt of a block.

    A turn repeats the whole blocks of the turn before: its last block had room left, and is another
    one now. One turn in ten goes back into the conversation, and on from anywhere there.
    """
    draw, fresh = random.Random(seed), count(1)
    histories: list[list[int]] = []
    lines = []
    for number in range(requests):
        if len(histories) < talking or draw.random() < 0.3:
            histories.append([0])
        at = draw.randrange(max(0, len(histories) - talking), len(histories))
        kept = histories[at]
        if draw.random() < 0.1:
            kept = kept[: draw.randint(1, len(kept))]
        length = len(kept) * BLOCK_TOKENS + 1 + int(draw.lognormvariate(7.5, 1.0))
        ids = kept + [next(fresh) for _ in range(-(-length // BLOCK_TOKENS) - len(kept))]
        histories[at] = ids[: length // BLOCK_TOKENS] if length % BLOCK_TOKENS else ids
        fields = {"timestamp": number, "input_length": length, "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(fields))
    file.write_text("\n".join(lines))
    return traces.load(file)
