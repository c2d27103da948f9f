"""The relays: who is told what tasks owe, by workers and clients alike, in this order.

Those of flows come first, as ends of other tasks follow from what they settle.
"""

from __future__ import annotations

from mtask.features.callbacks import operations as callbacks
from mtask.features.flows import settle as settling

RELAYS = (settling.RELAY, callbacks.RELAY)
