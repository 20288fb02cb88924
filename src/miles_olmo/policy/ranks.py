"""The trainer's processes: which of them does what, and every wait of one for the others.

Layout: `data` replicas of `expert` processes each, expert innermost,

    rank           0  1  2  3        data = 2, expert = 2
    data_index     0  0  1  1
    expert_index   0  1  0  1

so consecutive ranks hold one whole policy: each has `num_experts / expert` experts of every layer and
all other weights. Every rank trains packs of its own.

Ordering contract: all ranks run the same collective operations in the same order. Rank 0, the
leader, decides the order by announcing each piece of work (`announce`); the others wait for the next
one without a limit, since sampling may take long. Inside a piece of work every wait is bounded by
`train.parallel.timeout_seconds`. A wait that fails is E300 when a connection broke (another process
ended; its own error says why) and E301 when somebody did not come in time, naming who.

Tensors of the host travel through gloo, those of a GPU through NCCL; nothing is pickled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from miles_olmo.base.errors import TrainingError
from miles_olmo.policy.rank_messages import Message, decode, encode

LOST_RANK_CODES = ("E300", "E301")
"""Errors about another process; whatever that process says itself comes first."""

_IDLE = timedelta(hours=1)
"""Length of one wait for the next announcement; it is repeated for as long as the leader lives."""
MEETING_SECONDS = 300.0
"""How long processes wait for each other at the start: they import for a long time, and not equally."""
_ROLL_CALL_SECONDS = 3.0
"""How long a rank that waited in vain listens for the others that wait, too."""
_KEPT_ANNOUNCEMENTS = 1000


@dataclass(eq=False)
class Ranks:
    """This process among the trainer's processes. `ALONE` is the only one of its kind."""

    rank: int = 0
    data: int = 1
    """Replicas of the policy."""
    expert: int = 1
    """Processes that one replica is spread over."""
    timeout_seconds: float = 300.0
    store: Any = None
    """torch's key-value store, served by rank 0; None when alone."""
    expert_group: Any = None
    """Ranks that hold one policy together."""
    replica_group: Any = None
    """Ranks that hold the same experts."""
    _announced: int = field(default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copied policy lives in the same process

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.data * self.expert

    @property
    def is_leader(self) -> bool:
        """Whether this process owns the loop, the samples and the files of the run."""
        return self.rank == 0

    @property
    def data_index(self) -> int:
        return self.rank // self.expert

    @property
    def expert_index(self) -> int:
        return self.rank % self.expert

    # Work, announced by the leader.

    def announce(self, work: str, messages: Sequence[Message] | Message = Message()) -> None:
        """Leader: make all others do a piece of work. Nothing happens when alone or not the leader.

        Args:
            work: Name of the work, known to the others.
            messages: One for all, or one for each rank (the leader's own is not sent).
        """
        if self.world == 1 or not self.is_leader:
            return
        number = self._announced
        self._announced += 1
        with self._waiting_for_all(f"announcing {work}"):
            self.store.set(f"work/{number}", work)
            if number >= _KEPT_ANNOUNCEMENTS:
                self.store.delete_key(f"work/{number - _KEPT_ANNOUNCEMENTS}")
        for rank in range(1, self.world):
            message = messages if isinstance(messages, Message) else messages[rank]
            self.send(rank, message)

    def next_work(self) -> tuple[str, Message]:
        """Other ranks: wait for the leader's next announcement, as long as the leader lives."""
        key = f"work/{self._announced}"
        self._announced += 1
        with self._waiting_for_all("waiting for work"):
            while not _is_set(self.store, key):
                pass
            work = self.store.get(key).decode()
        return work, self.receive(0)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to another rank, which calls `receive`."""
        body = encode(message)
        with self._waiting_for_all("sending a message"):
            dist.send(torch.tensor([body.numel()]), rank)
            dist.send(body, rank)

    def receive(self, rank: int) -> Message:
        """The next message from a rank."""
        size = torch.zeros(1, dtype=torch.int64)
        with self._waiting_for_all("receiving a message"):
            dist.recv(size, rank)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(body, rank)
        return decode(body)

    # Collectives. All of them return at once when there is nobody to wait for.

    def sum_everywhere(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place; all ranks get the same bits."""
        if self.world > 1:
            with self._waiting_for_all("adding up gradients"):
                dist.all_reduce(tensor)

    def sum_over_replicas(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over the ranks that hold the same experts, in place."""
        if self.data > 1:
            with self._waiting_for_all("adding up gradients of experts"):
                dist.all_reduce(tensor, group=self.replica_group)

    def gather_from_experts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the ranks that hold one policy, in their order; equal shapes."""
        if self.expert == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.expert)]
        with self._waiting_for_all("comparing experts"):
            dist.all_gather(parts, tensor.contiguous(), group=self.expert_group)
        return parts

    def gather_everywhere(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order; equal shapes."""
        if self.world == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        with self._waiting_for_all("comparing results"):
            dist.all_gather(parts, tensor.contiguous())
        return parts

    def gather_shards(self, shard: torch.Tensor) -> torch.Tensor | None:
        """Shards joined along their first dimension, on the leader; None elsewhere.

        Only the first replica takes part.
        """
        if self.data_index != 0:
            return None
        parts = None
        whole = None
        if self.is_leader:
            whole = shard.new_empty((shard.shape[0] * self.expert, *shard.shape[1:]))
            parts = list(whole.chunk(self.expert))
        with self._waiting_for_all("gathering experts"):
            dist.gather(shard.contiguous(), parts, dst=0, group=self.expert_group)
        return whole

    def exchange(
        self, rows: torch.Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> torch.Tensor:
        """Send consecutive runs of rows to the ranks of one policy and receive theirs.

        Args:
            rows: `[sum(send), ...]`, in the order of the receiving ranks.
            receive: Rows that come from each rank [expert].
            send: Rows that go to each rank [expert].

        Returns:
            `[sum(receive), ...]`, in the order of the sending ranks.
        """
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self._waiting_for_all("exchanging tokens"):
            dist.all_to_all_single(
                arrived, rows.contiguous(), list(receive), list(send), group=self.expert_group
            )
        return arrived

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            with self._waiting_for_all("meeting the other processes"):
                dist.all_reduce(torch.zeros(1))

    # Failure.

    @contextmanager
    def _waiting_for_all(self, what: str) -> Iterator[None]:
        """Turn torch's error of a wait into one that says who is missing.

        Raises:
            TrainingError: E300, E301.
        """
        try:
            yield
        except RuntimeError as error:
            raise self._wait_failed(what, error) from error

    def _wait_failed(self, what: str, error: RuntimeError) -> TrainingError:
        text = str(error).splitlines()[0][:300]
        timed_out = "time" in text.lower() and "out" in text.lower()
        missing = self._roll_call(listen=timed_out)
        if not timed_out:
            return TrainingError(
                "E300",
                f"process {self.rank} of {self.world} lost another one while {what}",
                why="a process of the trainer ended, and its connections with it",
                fix="look at the error of the process that ended first",
                rank=self.rank,
                cause=text,
            )
        names = ", ".join(map(str, missing)) or "none"
        return TrainingError(
            "E301",
            f"process {self.rank} of {self.world} waited {self.timeout_seconds:g} s in vain while "
            f"{what}; processes that were not waiting: {names}",
            why="all processes of the trainer take part in every operation, and these did not come",
            fix="look at their logs; raise train.parallel.timeout_seconds if they only were slow",
            rank=self.rank,
            missing=missing,
            cause=text,
        )

    def _roll_call(self, *, listen: bool) -> list[int]:
        """Say that this rank waits; with `listen` the ranks that did not say so in time."""
        missing = [rank for rank in range(self.world) if rank != self.rank]
        try:
            self.store.set_timeout(timedelta(seconds=_ROLL_CALL_SECONDS))
            self.store.set(f"waiting/{self.rank}", "")
            deadline = time.monotonic() + _ROLL_CALL_SECONDS
            while listen and missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self.store.check([f"waiting/{rank}"])]
                time.sleep(0.05)
        except RuntimeError:  # the store is the leader's: it has ended or hangs
            return [0]
        return missing


ALONE = Ranks()
"""The trainer is one process: no process group, no collective, no copy."""


def listen_for_ranks() -> socket.socket:
    """A socket on the loopback interface, for the store of the leader's `connect_ranks`."""
    return socket.create_server(("127.0.0.1", 0))


def connect_ranks(
    rank: int,
    data: int,
    expert: int,
    *,
    port: int,
    listener: socket.socket | None,
    device: torch.device,
    timeout_seconds: float,
    meeting_seconds: float = MEETING_SECONDS,
) -> Ranks:
    """Meet the other processes; returns when all are there.

    Everything binds to the loopback interface: the store has no password.

    Args:
        port: Of the leader's store.
        listener: The leader's socket from `listen_for_ranks`; None for the others.
        timeout_seconds: Bound of every later wait.
        meeting_seconds: Bound of this one.

    Raises:
        TrainingError: E300 or E301, not all of them came.
    """
    timeout = timedelta(seconds=timeout_seconds)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    ranks = Ranks(rank, data, expert, timeout_seconds)
    with ranks._waiting_for_all("meeting the other processes"):
        ranks.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=meeting_seconds),
            master_listen_fd=None if listener is None else listener.detach(),
        )
        _meet(ranks, meeting_seconds)
        ranks.store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("groups", ranks.store),
            rank=rank,
            world_size=ranks.world,
            timeout=timeout,
        )
        # Every process creates every group, in the same order.
        for index in range(data):
            group = dist.new_group(list(range(index * expert, (index + 1) * expert)), timeout)
            if index == ranks.data_index:
                ranks.expert_group = group
        for index in range(expert):
            group = dist.new_group(list(range(index, ranks.world, expert)), timeout)
            if index == ranks.expert_index:
                ranks.replica_group = group
    return ranks


def _meet(ranks: Ranks, seconds: float) -> None:
    """Wait until every process has come as far as the store.

    Raises:
        TrainingError: E301.
    """
    everybody = [f"here/{rank}" for rank in range(ranks.world)]
    ranks.store.set(everybody[ranks.rank], "")
    try:
        ranks.store.wait(everybody, timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(everybody) if not ranks.store.check([key])]
        raise never_came(ranks.rank, seconds, missing) from error


def never_came(rank: int, seconds: float, missing: Sequence[int]) -> TrainingError:
    """The error of a process that the others did not come to meet."""
    return TrainingError(
        "E301",
        f"process {rank} waited {seconds:g} s in vain for process "
        f"{', '.join(map(str, missing))} to start",
        why="all processes of the trainer have to meet before the first step",
        fix="look at the logs of the named ones, then resume",
        rank=rank,
        missing=list(missing),
    )


def disconnect_ranks(ranks: Ranks) -> None:
    """Part in peace: nobody leaves before all have come this far."""
    if ranks.world > 1:
        ranks.barrier()
        dist.destroy_process_group()


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def _is_set(store: Any, key: str) -> bool:
    try:
        store.wait([key], _IDLE)
    except dist.DistStoreError:
        return False
    return True
