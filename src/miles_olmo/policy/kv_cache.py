"""Keys and values of the sequences an engine is generating, one slot per sequence.

Dimension legend: S slots, C capacity in positions, G key/value heads, D width of a head, N rows of
a decoding pass, T rows of a prefill pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from miles_olmo.policy.attention import attend_cached
from miles_olmo.policy.numerics import NumericRules
from miles_olmo.policy.olmo3moe_forward import PackedView


class KvCache:
    """Keys and values per layer, `[S, G, C, D]`; C grows in whole padding units."""

    def __init__(self, num_layers: int, num_slots: int, rules: NumericRules) -> None:
        self._rules = rules
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._capacity = 0
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers

    def take_slot(self) -> int:
        """Reserve a free slot."""
        return self._free.pop()

    def release_slot(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def reserve(self, num_positions: int) -> None:
        """Make room for sequences of this length; doubles, so that growing stays cheap."""
        if num_positions > self._capacity:
            self._capacity = self._rules.padded(max(num_positions, 2 * self._capacity))

    def clear(self) -> None:
        """Forget everything; slots stay taken. New storage is zeros, so no old NaN can leak in."""
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)

    def write_document(
        self, layer: int, slots: Sequence[int], k_TGD: torch.Tensor, v_TGD: torch.Tensor
    ) -> None:
        """Store a prefix of T positions in every one of the slots."""
        index = torch.tensor(slots, device=k_TGD.device)
        length = k_TGD.shape[0]
        keys, values = self._storage(layer, k_TGD)
        keys[index, :, :length] = k_TGD.transpose(0, 1)
        values[index, :, :length] = v_TGD.transpose(0, 1)

    def write_tokens(
        self,
        layer: int,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one position per slot; returns the layer's keys and values."""
        keys, values = self._storage(layer, k_NGD)
        keys[slots_N, :, positions_N] = k_NGD
        values[slots_N, :, positions_N] = v_NGD
        return keys, values

    def _storage(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None or keys.shape[2] < self._capacity:
            shape = (self._num_slots, like.shape[1], self._capacity, like.shape[2])
            # Zeros, because positions beyond a sequence are masked but still multiplied by 0.
            new_keys, new_values = like.new_zeros(shape), like.new_zeros(shape)
            if keys is not None and values is not None:
                new_keys[:, :, : keys.shape[2]] = keys
                new_values[:, :, : values.shape[2]] = values
            self.keys[layer], self.values[layer] = keys, values = new_keys, new_values
        return keys, values


class PrefillView:
    """A packed pass that also stores each document's keys and values in its slots."""

    def __init__(
        self,
        packed: PackedView,
        cache: KvCache,
        documents: Sequence[tuple[int, int, Sequence[int]]],
    ) -> None:
        """
        Args:
            packed: How the documents attend.
            cache: Where keys and values go.
            documents: (first row, length, slots) of each document to store.
        """
        self._packed = packed
        self._cache = cache
        self._documents = documents

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        for first, length, slots in self._documents:
            rows = slice(first, first + length)
            self._cache.write_document(layer, slots, k_TGD[rows], v_TGD[rows])
        return self._packed.attend(layer, q_THD, k_TGD, v_TGD, window)


class DecodeView:
    """One new token per sequence, which sees its sequence's cached positions and itself.

    Sequences of one padded length are attended in one call. Rows after the sequences are padding;
    they repeat the first sequence's result and are never stored.
    """

    def __init__(
        self, cache: KvCache, slots: Sequence[int], positions: Sequence[int], num_rows: int, rules
    ) -> None:
        self._cache = cache
        self._rules: NumericRules = rules
        self._slots_N = torch.tensor(slots)
        self._positions_N = torch.tensor(positions)
        by_length: dict[int, list[int]] = defaultdict(list)
        for row, position in enumerate(positions):
            by_length[rules.padded(position + 1)].append(row)
        for rows in by_length.values():  # by slot: neighbours in the cache need not be gathered
            rows.sort(key=slots.__getitem__)
        self._runs = [
            slice(slots[rows[0]], slots[rows[0]] + len(rows))
            if slots[rows[-1]] - slots[rows[0]] == len(rows) - 1
            else None
            for _, rows in sorted(by_length.items())
        ]
        self._groups = [(length, torch.tensor(rows)) for length, rows in sorted(by_length.items())]
        order = torch.cat([rows for _, rows in self._groups])
        restore = torch.empty_like(order)
        restore[order] = torch.arange(len(order))
        padding = restore[:1].expand(num_rows - len(slots))
        self._restore = torch.cat([restore, padding])

    def to(self, device: torch.device) -> DecodeView:
        """Move the index tensors."""
        self._slots_N = self._slots_N.to(device)
        self._positions_N = self._positions_N.to(device)
        self._groups = [(length, rows.to(device)) for length, rows in self._groups]
        self._restore = self._restore.to(device)
        return self

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        count = len(self._slots_N)
        keys, values = self._cache.write_tokens(
            layer, self._slots_N, self._positions_N, k_TGD[:count], v_TGD[:count]
        )
        outputs = []
        for (length, rows), run in zip(self._groups, self._runs, strict=True):
            if run is None:
                slots = self._slots_N[rows]
                k = keys[:, :, :length].index_select(0, slots)
                v = values[:, :, :length].index_select(0, slots)
            else:
                k, v = keys[run, :, :length], values[run, :, :length]
            outputs.append(
                attend_cached(
                    q_THD[rows],
                    k,
                    v,
                    self._positions_N[rows] + 1,
                    self._rules,
                    window,
                )
            )
        return torch.cat(outputs)[self._restore]
