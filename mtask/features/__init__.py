"""Features: each changes nothing of the queue where nobody uses it. `mtask.parts` is the only place that lists them."""
