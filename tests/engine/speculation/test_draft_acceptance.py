"""The host and the device accept the same drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.speculation.draft_acceptance import accept_drafts, accepted_on_device
from kvtide.engine.staging import Staging

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_the_device_accepts_what_the_host_does(rows: list[tuple[list[int], list[int]]]) -> None:
    chunks: list[Any] = []
    sampled: list[list[SampledToken]] = []
    for drafts, tokens in rows:
        chunks.append(SimpleNamespace(request=object(), drafts=tuple(drafts)))
        given_tokens = [*tokens, 0, 0, 0, 0, 0][: len(drafts) + 1]
        sampled.append([SampledToken(token, 0.0) for token in given_tokens])
    flat = torch.tensor([one.token for each in sampled for one in each])
    unread = accepted_on_device(chunks, flat, 4, Staging(CPU))
    host = [accept_drafts(c, s) for c, s in zip(chunks, sampled, strict=True)]
    assert unread.accepted.tolist() == [len(each) - 1 for each in host]
    order = [chunk.request for chunk in reversed(chunks)]
    last, accepted = unread.of(order, Staging(CPU))
    assert last.tolist() == [each[-1].token for each in reversed(host)]
    assert accepted.tolist() == [len(each) - 1 for each in reversed(host)]
