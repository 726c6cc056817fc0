# Apache-2.0 (see LICENSE)
"""LMCache's host tier: what it holds, what it can stage at once, and what really happens when it is too small.

All figures count L1 in slots of one chunk. The three behaviours that decide everything were measured on LMCache 0.5.2
with a real engine and on 0.5.6 without one:

* a restore reserves L1 for its **whole** prefix in one step, all or nothing; a request that finds no room is not
  queued, it recomputes (also LMCache/LMCache#4529, #5290);
* chunks stay in L1 until the engine has read them, so ``--l2-prefetch-max-in-flight`` protects nothing: what counts is
  how many requests arrive together;
* eviction runs once a second above the watermark and never because room is needed, so only ``(1 - w) x L1`` is
  guaranteed to be free in a retaining L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .checks import ceil_div


@dataclass(frozen=True)
class Restore:
    """Outcome of one restore: chunks served, chunks refused for lack of L1, and how many slots were missing."""

    hit_chunks: int
    oom_chunks: int
    short_chunks: int


def l1_slots(l1_bytes: int, slot_bytes: int) -> int:
    """Whole chunks in L1."""
    return l1_bytes // slot_bytes


def guaranteed_bytes(l1_bytes: int, watermark_millis: int) -> int:
    """Bytes always free in a retaining L1: ``(1 - w) x L1``. ``watermark_millis`` is w in thousandths."""
    return l1_bytes * (1000 - watermark_millis) // 1000


def predict_restores(slots: int, resident: int, arrivals: Sequence[int], read_between: bool = False) -> list[Restore]:
    """What restores of ``arrivals`` chunks get when they arrive together (or one after the other, if read between).

    ``resident`` chunks are in L1 already and stay. There is no in-flight parameter on purpose: measured with limits of
    8, 2 and 1 the outcome was the same.
    """
    free = slots - resident
    outcome = []
    for chunks in arrivals:
        if chunks <= free:
            outcome.append(Restore(chunks, 0, 0))
            free -= 0 if read_between else chunks
        else:
            outcome.append(Restore(0, chunks, chunks - max(free, 0)))
    return outcome


def room_bytes(l1_bytes: int, reserve_bytes: int, held_millis: int) -> int:
    """What restores can count on: L1 without the store reserve, and of a retaining L1 never more than is guaranteed.

    ``held_millis`` is the watermark of a retaining L1 in thousandths, 0 for one that only stages.
    """
    return max(min(l1_bytes - reserve_bytes, guaranteed_bytes(l1_bytes, held_millis)), 0)


def l1_bytes_for(room: int, reserve_bytes: int, held_millis: int) -> int:
    """The least L1 whose ``room_bytes`` is ``room``; at a watermark of 1 no size has one, and only S is counted."""
    guaranteed = ceil_div(room * 1000, 1000 - held_millis) if held_millis < 1000 else 0
    return max(room + reserve_bytes, guaranteed)


def restores_at_once(room: int, prefix_bytes: int) -> int:
    """How many restores of ``prefix_bytes`` fit: ``floor(room / prefix)``."""
    return room // prefix_bytes if prefix_bytes else 0


def mean_chunks_at_once(room_chunks: int, arrivals: int) -> int:
    """The mean length, in chunks, at which ``arrivals`` simultaneous restores just fit."""
    return room_chunks // arrivals


def prefetch_in_flight(restores: int, waiting: int, arrivals: int) -> int:
    """F = ``floor(room / N) - W``, at least 1 and not above what can arrive.

    It keeps hopeless loads off the disk; it does not protect L1.
    """
    return min(max(restores - waiting, 1), arrivals)


def evict_once(resident: int, slots_milli: int, watermark_millis: int, ratio_millis: int) -> int:
    """Residents after one tick of the 1 Hz eviction loop; ``slots_milli`` is L1 in thousandths of a chunk.

    At or above the watermark ``int(ratio x keys)`` keys go, otherwise nothing.
    """
    if resident * 1000 * 1000 < watermark_millis * slots_milli:
        return resident
    return resident - max(resident * ratio_millis // 1000, 1)


def evict_until_idle(resident: int, slots_milli: int, watermark_millis: int, ratio_millis: int) -> int:
    """Residents when the eviction loop has nothing more to do."""
    while resident:
        after = evict_once(resident, slots_milli, watermark_millis, ratio_millis)
        if after == resident:
            break
        resident = after
    return resident


def store_into_retaining_l1(
    resident: int, chunks: int, slots_milli: int, watermark_millis: int, ratio_millis: int, tick_at: int | None
) -> tuple[int, int]:
    """(stored, resident afterwards) for one prompt stored into a retaining L1.

    What finds no slot is never stored at all. ``tick_at`` is the number of residents at which the eviction loop fires
    while the prompt is being stored (it runs once a second, so this is timing, not arithmetic); None: it does not.
    """
    slots = slots_milli // 1000
    stored = 0
    ticked = tick_at is None
    while stored < chunks:
        if not ticked and tick_at is not None and resident >= tick_at:
            resident = evict_once(resident, slots_milli, watermark_millis, ratio_millis)
            ticked = True
        if resident >= slots:
            break
        resident += 1
        stored += 1
    return stored, resident


def store_reserve_chunks(max_num_batched_tokens: int, chunk_tokens: int, outstanding_steps: int = 4) -> int:
    """S: chunks of stores on their way to disk, ``ceil(MNBT / chunk) x outstanding steps``."""
    return ceil_div(max_num_batched_tokens, chunk_tokens) * outstanding_steps
