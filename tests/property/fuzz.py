"""The machine of `pool_machine` driven by a random number generator: any number of calls on one pool, from a seed.

Hypothesis makes many short histories and shrinks what fails; this makes long ones, over more kinds of pools, and is
what `experiments.soak` runs for hours. The rules, the model and the invariants are the machine's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis.stateful import Rule

from kvlab.core import Salt
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.retention import Limits, Retention
from kvlab.kv.spec import KVSpec, PageLayout
from kvlab.kv.storage import KVStorage
from tests.property.pool_machine import PoolMachine
from tests.property.reference import SPEC


@dataclass(frozen=True)
class FuzzConfig:
    """A kind of pool. `eviction` None: prefixes are not shared; `block_size` None: contiguous."""

    num_blocks: int
    block_size: int | None
    max_seq_len: int
    eviction: str | None
    dtype: str = "float32"
    layout: PageLayout = PageLayout.HND
    limits: Limits | None = None  # of what is kept longer than other content

    @property
    def name(self) -> str:
        """What a command line calls it."""
        kind = "contiguous" if self.block_size is None else f"paged{self.block_size}"
        eviction = f"{self.eviction or 'private'}{'_kept' if self.limits else ''}"
        return "-".join([kind, eviction, self.dtype, self.layout])

    def pool(self) -> BlockPool:
        size = self.block_size or self.max_seq_len
        key_dtype, _, value_dtype = self.dtype.partition("+")
        spec = KVSpec(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, key_dtype, value_dtype or None)
        storage = KVStorage(spec, self.num_blocks, size, layout=self.layout)
        if self.block_size is None:
            return ContiguousKVCachePool(self.num_blocks, self.max_seq_len, storage)
        policy = EVICTION_POLICIES.get(self.eviction or "lru")
        return PagedKVCachePool(
            self.num_blocks,
            size,
            self.max_seq_len,
            storage,
            prefix_sharing=self.eviction is not None,
            eviction=policy() if self.limits is None else Retention(policy, self.limits),
        )


LIMITS = Limits(pinned=3, pin_ttl_s=9, ttl_s=6, quota=3)
HND, NHD = PageLayout.HND, PageLayout.NHD
#: Each pool is so small that two or three of its longest sequences exhaust it.
CONFIGS = {
    config.name: config
    for config in (
        FuzzConfig(4, None, 15, None, "float32", HND),
        FuzzConfig(3, None, 24, None, "bfloat16", NHD),
        FuzzConfig(5, None, 12, None, "int8+fp8_e4m3", HND),
        FuzzConfig(24, 1, 15, None, "float32", NHD),
        FuzzConfig(12, 4, 18, None, "int8", NHD),
        FuzzConfig(9, 5, 23, None, "float16", HND),
        FuzzConfig(7, 16, 50, None, "bfloat16", HND),
        *(FuzzConfig(10, 2, 12, eviction, limits=LIMITS) for eviction in EVICTION_POLICIES.names()),
        *(
            FuzzConfig(*size, eviction, dtype, layout)
            for eviction, (size, dtype, layout) in product(
                EVICTION_POLICIES.names(),
                (
                    ((16, 1, 10), "bfloat16", NHD),
                    ((10, 2, 12), "float32", HND),
                    ((14, 3, 20), "float32", NHD),
                    ((12, 4, 18), "int8", NHD),
                    ((8, 8, 40), "fp8_e5m2+int8", HND),
                ),
            )
        ),
    )
}


@dataclass
class Fuzzed:
    """What a run did: calls by rule, and what the pool counted."""

    calls: Counter[str]
    counters: dict[str, int]

    @property
    def operations(self) -> int:
        """Calls in all."""
        return self.calls.total()


class FuzzFailure(AssertionError):
    """What failed, with the way to see it again and the last calls."""


class FuzzMachine(PoolMachine):
    """The machine over any kind of pool, with its choices made by `random`."""

    def __init__(self, seed: int, config: FuzzConfig) -> None:
        super().__init__()
        self.random = random.Random(f"{seed} {config.name}")
        self.config = config
        self.first_blocks = int(config.block_size is None)
        self.sharing = config.eviction is not None
        self.tenants = 0
        self.arguments: dict[str, Callable[[], dict[str, Any]]] = {
            "admit": lambda: {"tokens": self.prompt(), "chunk": self.up_to(20), "twice": self.coin()},
            "advance": lambda: {"right": self.random.randint(0, 7)},
            "allocate_slot": lambda: {
                "tokens": self.prompt(),
                "salt": self.salt(),
                "keep_free": self.random.randint(0, 3),
                "resumed": self.coin(),
                "first_tokens": self.random.choice([None, self.random.randint(1, 9)]),
                "all_fit": self.coin(),
            },
            "allocate_slot_of_known_prefix": lambda: {
                "pick": self.random.randrange(1000),
                "tail": self.tokens(self.random.randint(0, 3)),
                "resumed": self.coin(),
            },
            "allocate_slot_of_unknown_tokens": lambda: {"length": self.length()},
            "ask": lambda: {"tokens": self.prompt(), "salt": self.salt()},
            "decode_all": lambda: {"token": self.random.randint(0, 1)},
            "fork_slot": lambda: {"pick": self.pick(), "rerun": self.coin(), "told": self.coin()},
            "free_slot": lambda: {"pick": self.pick(), "first": self.coin()},
            "free_slots": lambda: {"keep": self.random.randint(0, 2)},
            "launch": self.step_arguments,
            "launch_what_was_reserved": dict,
            "misuse": lambda: {"pick": self.pick(), "dead": self.random.randint(-1, 40)},
            "reserve": lambda: self.step_arguments() | {"guess": self.guess()},
            "pass_time": lambda: {"seconds": self.random.randint(0, 4)},
            "pin_prefix": lambda: {"pick": self.pick(), "tokens": self.length()},
            "rollback": dict,
            "run_step": lambda: self.step_arguments() | {"guess": self.guess(), "right": self.random.randint(0, 7)},
            "write": lambda: {"layer": self.random.randrange(SPEC.num_layers)},
        }

    def make_pool(self) -> BlockPool:
        return self.config.pool()

    def coin(self) -> bool:
        return self.random.random() < 0.5

    def up_to(self, most: int) -> int:
        return self.random.randint(1, most)

    def pick(self) -> int:
        return self.random.randrange(1000)

    def tokens(self, count: int) -> list[int]:
        return self.random.choices((0, 1), k=count)

    def length(self) -> int:
        """Of a prompt: mostly short, some longer than a sequence may be."""
        longest = self.pool.max_seq_len + 2
        return self.random.randint(0, longest if self.coin() else longest // 2)

    def prompt(self) -> list[int]:
        """Few prefixes, so that hits are frequent."""
        period = self.tokens(self.up_to(6)) if self.coin() else [0]
        length = self.length()
        return (period * length)[:length]

    def salt(self) -> Salt:
        """None for most; else an old tenant's, or, as from one that comes with another each time, a new one."""
        chosen = self.random.randrange(8)
        if chosen > 1:
            return None
        if chosen == 1:
            self.tenants += 1
            return self.tenants
        return "tenant"

    def guess(self) -> int:
        return self.up_to(7) if self.coin() else 0

    def step_arguments(self) -> dict[str, Any]:
        most = max(7, self.pool.block_size if self.pool.is_paged() else 7)
        wanted = [(self.pick(), self.up_to(most)) for _ in range(self.up_to(4))]
        return {"wanted": wanted, "extra": self.tokens(most)}


#: How often a rule is chosen where it may run; others: 1. Slots are opened about as often as they are closed.
WEIGHTS = {
    "allocate_slot": 0.5,
    "allocate_slot_of_known_prefix": 0.5,
    "allocate_slot_of_unknown_tokens": 0.3,
    "fork_slot": 0.5,
    "free_slots": 0.15,
    "misuse": 0.3,
    "ask": 0.3,
    "run_step": 1.5,
    "launch_what_was_reserved": 3,
    "advance": 2,
}


def run(seed: int, operations: int, config: FuzzConfig) -> Fuzzed:
    """Make this many calls of one pool, and compare it with its model after each.

    Raises FuzzFailure, which names seed, kind of pool and number of the call, and shows the last calls.
    """
    machine = FuzzMachine(seed, config)
    rules = sorted(machine.rules, key=lambda rule: rule.function.__name__)
    calls: Counter[str] = Counter()
    history: list[str] = []
    try:
        machine.start([machine.up_to(6) for _ in range(machine.up_to(3))])
        _check(machine)
        for _ in range(operations):
            rule = _choose(machine, rules)
            arguments = machine.arguments[rule.function.__name__]()
            calls[rule.function.__name__] += 1
            history = [*history[-9:], f"{rule.function.__name__}({arguments})"]
            rule.function(machine, **arguments)
            _check(machine)
        counters = machine.pool.counters()._asdict()
        machine.teardown()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "Failed":  # pytest.raises without an error
            raise
        shown = "\n  ".join(history)
        raise FuzzFailure(
            f"seed {seed}, {config.name}, call {calls.total()} of {operations}: {type(error).__name__}: {error}\n"
            f"python -m experiments.soak.run pools --config {config.name} --seed {seed} --operations {operations}\n"
            f"the last calls:\n  {shown}"
        ) from error
    return Fuzzed(calls, counters)


def _choose(machine: FuzzMachine, rules: list[Rule]) -> Rule:
    """One of the rules that may run now."""
    allowed = [rule for rule in rules if all(each(machine) for each in rule.preconditions)]
    weights = [WEIGHTS.get(rule.function.__name__, 1.0) for rule in allowed]
    return machine.random.choices(allowed, weights)[0]


def _check(machine: FuzzMachine) -> None:
    for invariant in machine.invariants:
        invariant.function(machine)
