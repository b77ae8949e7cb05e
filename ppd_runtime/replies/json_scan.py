"""Where a JSON value ends in a text that grows."""

_OPENS, _CLOSES = "{[", "}]"
_BEHIND_SCALARS = ",}] \t\r\n"


class ValueScan:
    """Finds the end of one JSON value, whose text may come in pieces; what is between brackets is not checked."""

    def __init__(self) -> None:
        self.is_whole = False
        """Whether the value's end has come."""
        self._levels, self._in_string, self._escaped, self._is_scalar = 0, False, False, False

    def push(self, text: str) -> int:
        """Add text; returns how many of its characters belong to the value."""
        for place, character in enumerate(text):
            if self._is_scalar:
                if character in _BEHIND_SCALARS:
                    self.is_whole = True
                    return place
            elif self._ends_with(character):
                self.is_whole = True
                return place + 1
        return len(text)

    def _ends_with(self, character: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return not self._in_string and not self._levels
        if character == '"':
            self._in_string = True
        elif character in _OPENS:
            self._levels += 1
        elif character in _CLOSES:
            self._levels -= 1
            return self._levels <= 0
        elif not self._levels:
            self._is_scalar = True
        return False
