"""What a constructor does to tensors without memory, and their values, one after the other.

What a constructor does to large tensors is done to a few at a time, and recorded, by the memory that they would lie in.
Their values come of doing it again. Random numbers are drawn both times from the same states of the generators, so
values, and all that is drawn after them, are the same bits as if the tensors had been there.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from ddp_recipes._compat.dispatch import OpOverload, takes_device, written
from ddp_recipes._compat.torch_ import storage_key, tree_flatten, tree_unflatten

SMALLEST = 4096  # elements of a tensor that is made without memory
_RECENT = 4  # memories that are kept for a while: constructors look at what they have written

_CPU = torch.device("cpu")
_OPS: Any = torch.ops.aten
_OVERWRITING = {
    *(_OPS.copy_, _OPS.fill_, _OPS.zero_, _OPS.normal_, _OPS.uniform_, _OPS.random_, _OPS.exponential_),
    *(_OPS.bernoulli_, _OPS.cauchy_, _OPS.geometric_, _OPS.log_normal_),
}


class Undeferrable(Exception):
    """What a constructor does with a tensor needs its memory there and then."""


class Ref(NamedTuple):
    """A tensor without memory: the number of the memory that it would lie in, and how."""

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, number: int) -> "Ref":
        return cls(number, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor that lies so in a memory."""
        made: Any = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.size, self.stride)  # type: ignore[no-any-return]

    def fills(self, storage: UntypedStorage) -> bool:
        """Whether nothing else lies there."""
        numbers = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != numbers:
                return False
            numbers *= size
        return numbers * self.dtype.itemsize == storage.nbytes()


class _Generator(NamedTuple):
    """A generator of the constructor's own, in the state that it had."""

    state: Tensor


@dataclass(frozen=True)
class _Entry:
    """An operation that wrote to memory.

    Attributes:
        leaves: of its arguments, which have the nested ``form``.
        reads: memories whose content counts.
        state: of the default generator, if numbers were drawn.
        default: the dtype of numbers that have none.
        outputs: those of its results that are without memory.
    """

    function: OpOverload
    leaves: Sequence[Any]
    form: Any
    reads: set[int]
    state: Tensor | None
    default: torch.dtype
    outputs: Sequence[Ref | None] = ()

    @property
    def numbers(self) -> set[int]:
        """The memories of its tensors."""
        return {each.number for each in (*self.leaves, *self.outputs) if isinstance(each, Ref)}


class InitRecorder:
    """What was done to tensors without memory."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.storages: list[UntypedStorage] = []  # by number; kept, so that no other gets the key of one
        self.numbers: dict[int, int] = {}  # by key
        self.writers: list[list[int]] = []  # of each memory: places in the entries
        self.recent: dict[int, UntypedStorage] = {}  # what some memories hold now
        self.threads = torch.get_num_threads()  # on which the bits of some operations depend
        self.uses_meta = False  # the constructor, for what it makes
        self.refused: str | None = None

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is without memory because of this."""
        return tensor.is_meta and storage_key(tensor) in self.numbers

    def ref(self, tensor: Tensor) -> Ref:
        """Return where a tensor would lie."""
        return Ref.of(tensor, self.numbers[storage_key(tensor)])

    def refuse(self, what: str) -> Undeferrable:
        """Return the error to raise, which counts even where the constructor catches it."""
        self.refused = self.refused or what
        return Undeferrable(what)

    # --- recording

    def apply(self, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do an operation of the constructor's; large tensors that it makes are without memory."""
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        mine, name = [each for each in tensors if self.has(each)], function.overloadpacket.__name__
        device = kwargs.get("device") or (_CPU if mine or not tensors else tensors[0].device)
        if device.type == "meta" and not self.uses_meta:  # that of a tensor of ours
            return self.apply(function, args, {**kwargs, "device": _CPU})
        if takes_device(function) and (not tensors or name.startswith("new_") or name.endswith("_like")):
            if device.type != "cpu" or kwargs.get("pin_memory"):
                return function(*args, **kwargs)
            leaves, form = tree_flatten((args, {**kwargs, "device": _CPU}))
            shapes = [torch.empty_like(each, device="meta") if isinstance(each, Tensor) else each for each in leaves]
            return self._do(function, shapes, shapes, form, set())
        if not mine:
            return function(*args, **kwargs)
        if self.uses_meta or len(mine) < sum(each.is_meta for each in tensors):
            raise self.refuse(f"{name} with a tensor on meta")
        if name in ("resize_", "resize_as_") or (name == "set_" and len(mine) < 2):
            raise self.refuse(name)
        if function.is_view or torch.Tag.inplace_view in function.tags or name == "set_":
            return function(*args, **kwargs)
        refs = [self.ref(leaf) if isinstance(leaf, Tensor) and self.has(leaf) else leaf for leaf in leaves]
        needed = [each for each in refs if isinstance(each, Ref)]
        if function.overloadpacket in _OVERWRITING and needed[0] is refs[0]:
            needed = needed[needed[0].fills(self.storages[needed[0].number]) :]
        return self._do(function, leaves, refs, form, {each.number for each in needed})

    def _do(self, function: OpOverload, leaves: list[Any], refs: list[Any], form: Any, reads: set[int]) -> Any:
        """Do an operation in memory of its own; record it if that is not kept."""
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        state, kept = torch.get_rng_state() if drawn else None, [_kept(each) for each in refs]
        entry = _Entry(function, kept, form, reads, state, torch.get_default_dtype())
        storages = {number: self.recent[number] for number in entry.numbers if number in self.recent}
        storages |= self.replay(reads - storages.keys())
        real = [self._real(each, storages) for each in refs]
        args, kwargs = tree_unflatten(real, form)
        made, shape = tree_flatten(function(*args, **kwargs))
        places = {storage_key(one): each.number for one, each in zip(real, refs, strict=True) if isinstance(each, Ref)}
        writes = {places[key] for each in written(function, args, kwargs) if (key := storage_key(each)) in places}
        given = {id(one): leaf for one, leaf in zip(real, leaves, strict=True) if isinstance(one, Tensor)}
        outputs: list[Ref | None] = [None] * len(made)
        for at, each in enumerate(made):
            if id(each) in given:
                made[at] = given[id(each)]
            elif _is_large(each):
                key = storage_key(each)
                if key not in places:
                    places[key] = number = self._new(each.untyped_storage().nbytes())
                    storages[number] = each.untyped_storage()
                    writes.add(number)
                outputs[at] = ref = Ref.of(each, places[key])
                made[at] = ref.on(self.storages[ref.number])
        if writes:
            for number in writes:
                self.writers[number].append(len(self.entries))
            self.entries.append(replace(entry, outputs=outputs))
        for number, storage in storages.items():
            self.recent.pop(number, None)
            self.recent[number] = storage
        for number in [*self.recent][:-_RECENT]:
            del self.recent[number]
        return tree_unflatten(made, shape)

    def _new(self, nbytes: int) -> int:
        """Return the number of another memory."""
        made = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.storages.append(made.untyped_storage())
        self.numbers[storage_key(made)] = number = len(self.writers)
        self.writers.append([])
        return number

    def _real(self, leaf: Any, storages: dict[int, UntypedStorage]) -> Any:
        """Return an argument in memory."""
        if isinstance(leaf, _Generator):
            generator = torch.Generator()
            generator.set_state(leaf.state)
            return generator
        if not isinstance(leaf, Ref):
            return leaf
        if leaf.number not in storages:
            storages[leaf.number] = UntypedStorage(self.storages[leaf.number].nbytes())  # type: ignore[no-untyped-call]
        return leaf.on(storages[leaf.number])

    # --- doing it again

    def replay(self, numbers: set[int]) -> dict[int, UntypedStorage]:
        """Return what memories hold after all that was recorded."""
        chosen = [self.entries[at] for at in self.needed(numbers)]
        storages: dict[int, UntypedStorage] = {}
        last = {number: at for at, entry in enumerate(chosen) for number in entry.numbers}
        with self._as_recorded():
            for at, entry in enumerate(chosen):
                if entry.state is not None:
                    torch.set_rng_state(entry.state)
                torch.set_default_dtype(entry.default)
                args, kwargs = tree_unflatten([self._real(leaf, storages) for leaf in entry.leaves], entry.form)
                made, _ = tree_flatten(entry.function(*args, **kwargs))
                for each, ref in zip(made, entry.outputs, strict=True):
                    if ref is not None:
                        assert Ref.of(each, ref.number) == ref
                        storages[ref.number] = each.untyped_storage()
                for number in entry.numbers - numbers:
                    if last[number] == at:
                        del storages[number]
        return storages

    def needed(self, numbers: set[int]) -> list[int]:
        """Return the places of the entries on which the content of memories depends, in their order."""
        chosen: set[int] = set()
        reads = [(number, len(self.entries)) for number in numbers]
        while reads:
            number, before = reads.pop()
            earlier = bisect_left(self.writers[number], before)
            if earlier and (at := self.writers[number][earlier - 1]) not in chosen:
                chosen.add(at)
                reads += [(each, at) for each in self.entries[at].reads]
        return sorted(chosen)

    def origin(self, number: int) -> list[Any]:
        """Return what the content of a memory depends on, as plain data."""
        found = []
        for entry in map(self.entries.__getitem__, self.needed({number})):
            leaves = [leaf.state if isinstance(leaf, _Generator) else leaf for leaf in entry.leaves]
            plain = [leaf if isinstance(leaf, Tensor) and not leaf.is_meta else repr(leaf) for leaf in leaves]
            found.append([str(entry.function), plain, entry.state])
        return found

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Leave threads, generator and default dtype as they are."""
        threads, default = torch.get_num_threads(), torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                torch.set_num_threads(self.threads)
                yield
            finally:
                torch.set_num_threads(threads)
                torch.set_default_dtype(default)


def _kept(leaf: Any) -> Any:
    """Return an argument as it is now."""
    if isinstance(leaf, torch.Generator):
        return _Generator(leaf.get_state())
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() >= SMALLEST
        and value.is_cpu
        and value.layout == torch.strided
        and type(value) is Tensor
    )
