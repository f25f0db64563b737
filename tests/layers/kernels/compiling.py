"""Compiles the kernels of swap-in for an H200, on a machine without one.

A process of its own: in tests on a CPU, kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtide.layers.kernels import swap_in, swap_plan
from kvtide.layers.kernels.grid import divided_up, power_of_two

NUMBERS = (
    *("stride_table", "stride_host_table", "stride_hot_rows", "stride_marks", "layer"),
    "tokens",
)
SHAPES = {"DeepSeek-V3.2": (4096, 2048, 656, 1), "DeepSeek-V4": (2048, 512, 584, 4)}
"""Entries of a hot row, entries that a query selects, bytes of an entry, tokens of an entry."""
PAGE = 64


def compiled(
    kernel: Any, constants: Mapping[str, int], wide: Sequence[str], aligned: Sequence[str]
) -> str:
    """The PTX of a kernel: `wide` pointers are of int64, `aligned` ones of 16 bytes."""
    names = [parameter.name for parameter in kernel.params]
    types = {name: "i32" if name in NUMBERS else "*i32" for name in names}
    types |= dict.fromkeys(wide, "*i64")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    warps = max(4, min(32, constants.get("BLOCK_B", 0) // 256))
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(built.asm["ptx"])


def main() -> None:
    for name, (entries, count, size, ratio) in SHAPES.items():
        shape = {
            "ROWS": 128,
            "ENTRIES": entries,
            "ROW_ENTRIES": entries,
            "FIRST_GATHER": 1 << 20,
            "PAGE": PAGE,
            "RATIO": ratio,
        }
        for queries in (1, entries // count):
            choices = power_of_two(queries * count)
            block = min(choices, swap_in.MAX_CHOICES)
            plan = {
                "COUNT": count,
                "ONE_TILE": choices == block,
                "BLOCK_B": power_of_two(entries),
                "BLOCK_C": block,
                "BLOCK_NEW": power_of_two(divided_up(queries, ratio)),
            }
            compiled(swap_plan.plan_rows, shape | plan, ["counts"], ["selected", "located", "held"])
        slots = {"BLOCK_B": power_of_two(entries)}
        compiled(swap_plan.plan_gathered, shape | slots, ["counts"], ["wanted", "held", "used"])
        marked = {"COUNT": count, "BLOCK": min(swap_in.MAX_MARKED, count)}
        compiled(swap_in._mark_wanted, shape | marked, [], ["selected", "located"])
        lanes = 2 if size % 16 == 0 else 1
        words = {
            "ARENA_STRIDE": PAGE * size // 8,
            "HOST_STRIDE": PAGE * size // 8 * 61,
            "WORDS": size // 8 // lanes,
            "LANES": lanes,
            "BLOCK": swap_in.BLOCK_WORDS,
        }
        pages = ["arena", "host"]
        for kernel, more, wide in (
            (swap_in._load_wanted, {}, [*pages, "counts"]),
            (swap_in._move_entries, {"LOADERS": 128}, pages),
        ):
            ptx = compiled(kernel, shape | words | more, wide, pages)
            assert ("ld.global.v2.b64" in ptx) == (lanes == 2), "words are loaded whole"
        print(f"{name}: compiled")


if __name__ == "__main__":
    main()
