"""Whether all ranks have the same parameters, of which rank 0's are saved: only gradients are exchanged."""

from collections.abc import Sequence

from ddp_recipes.errors import RunFailed


def refuse_differing(names: Sequence[str], of_ranks: Sequence[Sequence[int]]) -> None:
    """Refuse to go on with parameters that are not the same on all ranks.

    Args:
        names: of the parameters.
        of_ranks: the sums of bits of each, by rank.

    Raises:
        RunFailed: names the first that differs, and where.
    """
    for place, name in enumerate(names):
        ranks = [rank for rank, sums in enumerate(of_ranks) if sums[place] != of_ranks[0][place]]
        if ranks:
            other = ", ".join(map(str, ranks[:8])) + (", …" if ranks[8:] else "")
            raise RunFailed(
                f"The parameter {name.removeprefix('model.')} has other values on rank {other} than on rank 0, whose "
                f"are saved: something writes to it by what a rank alone has seen. A forward pass does so, with "
                f"nn.Embedding(max_norm=…) or averages over a batch, or a callback that not all ranks run alike. Have "
                f"all ranks write the same once a step (in a callback's on_step, or on_train_batch_end of a Lightning "
                f"module), or make it a buffer (register_buffer), of which all get rank 0's."
            )
