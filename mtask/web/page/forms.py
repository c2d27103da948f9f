"""Forms: their fields as text, and the values that the fields hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from mtask.errors import InvalidInput, shown
from mtask.kernel.driver.extended_json import parse_strict
from mtask.web.bodies import Hold, body_of, values_in
from mtask.web.problems import BadRequest, UnsupportedMediaType

_TYPE = "application/x-www-form-urlencoded"
_MOST_FIELDS = 200
#: The most values of JSON in one field. It is parsed on the event loop, so nobody else is served meanwhile.
_MOST_VALUES = 10_000
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Form:
    """The fields of a form or of a query. White space around a text counts only where it is asked for exactly."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def exact(self, name: str) -> str | None:
        """Return the text of a field as it is; None: the field is missing."""
        return self._values.get(name, [None])[-1]

    def text(self, name: str) -> str:
        """Return the text of a field, without white space around it; "" if it is missing."""
        return (self.exact(name) or "").strip()

    def texts(self, name: str) -> list[str]:
        """Return all texts of a field that are not empty."""
        return [value.strip() for value in self._values.get(name, ()) if value.strip()]

    def needed(self, name: str) -> str:
        """Return the text of a field; raise InvalidInput if it is empty."""
        found = self.text(name)
        if not found:
            raise InvalidInput(f"{name}: this is needed.", field=name)
        return found

    def whole(self, name: str) -> int | None:
        """Return a field's whole number, or None if it is empty; raise InvalidInput."""
        text = self.text(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise InvalidInput(f"{name} {shown(text)}: use a whole number.", field=name)
        return int(text)

    def seconds(self, name: str) -> float | None:
        """Return a length of time, such as 90, 90s, 5m, 2h or 1d, in seconds; raise InvalidInput."""
        text = self.text(name).lower().replace(" ", "")
        if not text:
            return None
        number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1] in _UNITS else (text, 1)
        try:
            if not (number.isascii() and len(number) < 16 and number.replace(".", "", 1).isdigit()):
                raise ValueError(number)
            return float(number) * unit
        except ValueError:
            raise InvalidInput(f"{name} {shown(text)}: write 90, 90s, 5m, 2h or 1d.", field=name) from None

    def value(self, name: str) -> Any:
        """Return a field's extended JSON; None if it is empty. Raises InvalidInput."""
        text = self.text(name)
        if values_in(text.encode("utf-8", "replace"), _MOST_VALUES) > _MOST_VALUES:
            raise InvalidInput(f"{name}: it has more than {_MOST_VALUES} values. Use the API.", field=name)
        return parse_strict(text, name) if text else None

    def instant(self, name: str) -> datetime | None:
        """Return a field's instant, in UTC; None if it is empty. Raises InvalidInput. Without an offset, it is UTC."""
        text = self.text(name)
        if not text:
            return None
        try:
            found = datetime.fromisoformat(text)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            raise InvalidInput(f"{name} {shown(text)}: write 2030-12-31 23:59, in UTC.", field=name) from None

    def given(self) -> Mapping[str, list[str]]:
        """Return all fields that are not empty."""
        return {name: kept for name in self._values if (kept := self.texts(name))}


def query_of(request: Request) -> Form:
    """Return the query of an address as a form."""
    return Form(_pairs(request.scope.get("query_string", b"")))


async def form_of(request: Request, largest: int, hold: Hold | None = None) -> Form:
    """Read the form in a request's body; raise a Refusal. `hold`: see `body_of`."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != _TYPE:
        raise UnsupportedMediaType(f"A form is sent as {_TYPE}.")
    return Form(_pairs(await body_of(request, largest, hold)))


def _pairs(encoded: bytes) -> list[tuple[str, str]]:
    try:
        text = encoded.decode("ascii")
        found = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise BadRequest("The form is not percent-encoded UTF-8, or has too many fields.") from None
    # Browsers send line ends as CR LF.
    return [(name, value.replace("\r\n", "\n")) for name, value in found]
