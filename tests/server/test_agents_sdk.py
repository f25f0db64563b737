"""A task of several steps with OpenAI's Agents SDK, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from tests.deferred import Deferred
from tests.server.serving import InProcess

agents = Deferred("agents")
openai = Deferred("openai")

MODEL = "tiny-0.1"
STEPS = 3


def task(model: agents.Model, seen: list[str]) -> agents.Agent[None]:
    """Looks into boxes until all are open, then says what was found.

    The model says anything that the grammar allows; which tools there are leads it.
    """

    @agents.function_tool(is_enabled=lambda *_: len(seen) < STEPS)
    def look(box: Literal["red", "blue"]) -> str:
        """Look into a box."""
        seen.append(box)
        return f"box {len(seen)} has a coin"

    @agents.function_tool(is_enabled=lambda *_: len(seen) == STEPS)
    def finish(coins: Literal[3]) -> str:
        """Say how many coins there are."""
        return f"{coins} coins"

    return agents.Agent(
        name="coins",
        instructions="Count the coins.",
        model=model,
        tools=[look, finish],
        tool_use_behavior=agents.StopAtTools(stop_at_tool_names=["finish"]),
        reset_tool_choice=False,
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=0
        ),
    )


@pytest.mark.full
@pytest.mark.parametrize("api", ["Responses", "ChatCompletions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_task_of_several_steps(server: InProcess, api: str, streamed: bool) -> None:
    agents.set_tracing_disabled(True)
    seen: list[str] = []

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            agent = task(getattr(agents, f"OpenAI{api}Model")(MODEL, client), seen)
            if not streamed:
                return await agents.Runner.run(agent, "Begin.", max_turns=STEPS + 2)
            running = agents.Runner.run_streamed(agent, "Begin.", max_turns=STEPS + 2)
            async for _ in running.stream_events():
                pass
            return running

    result = asyncio.run(run())
    assert result.final_output == "3 coins"
    assert len(seen) == STEPS and set(seen) <= {"red", "blue"}
    assert len(result.raw_responses) == STEPS + 1
    outputs = [item for item in result.new_items if isinstance(item, agents.ToolCallOutputItem)]
    assert [item.output for item in outputs][:STEPS] == [
        f"box {number + 1} has a coin" for number in range(STEPS)
    ]
