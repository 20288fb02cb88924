"""What the leader of the trainer's processes can make the others do."""

from __future__ import annotations

from enum import StrEnum


class Work(StrEnum):
    """Names of announced work, each with the message that goes with it."""

    LEARN = "learn"
    """One step's updates: `shares.shares_message`, one for each process."""
    SUPERVISE = "supervise"
    """One warm-up step: `warmup.SupervisedShare.message`, one for each process."""
    KEEP = "keep"
    """Take a snapshot of the warm-up."""
    GO_BACK = "go-back"
    """Return to the warm-up's last snapshot."""
    REFRESH = "refresh"
    """Take the optimizer's masters from the policy's weights."""
    PUBLISH = "publish"
    """Help to gather the weights for a publication."""
    SAVE = "save"
    """Help to gather weights and moments for a checkpoint."""
    LOAD = "load"
    """Resume from a checkpoint: {"path", "fingerprint"}."""
    START_FROM = "start-from"
    """Take the weights of a checkpoint: {"path"}."""
    LOAD_REFERENCE = "load-reference"
    """Load the frozen reference policy: {"path"}."""
    EXPORT = "export"
    """Help with an export and its check."""
    STOP = "stop"
    """The run is over."""
