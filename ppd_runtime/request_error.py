"""The error that ends one request only: the generator that raises it answers the next one."""

_FORM = "the schema, regex, choice or grammar"


class RequestError(RuntimeError):
    """A request has failed: the model gives no numbers to choose a token by, say, or a worker does not take it."""

    @property
    def fault_of_form(self) -> str:
        """How the request's own form of texts has failed it, which no model or worker can help; else empty."""
        _, form, what = str(self).partition(_FORM)
        return form + what


def no_text(why: str) -> RequestError:
    """The error if a request's form of texts cannot be followed any further."""
    return RequestError(f"{_FORM} cannot be followed here: {why}")


def no_numbers(position: int) -> RequestError:
    """The error if the model's logits for a position choose no token."""
    return RequestError(
        f"the model's logits for position {position} are NaN or infinite: a weight is damaged (check the model's "
        "files), or float16 overflows (choose dtype float32 or bfloat16)"
    )


def no_scores(position: int) -> RequestError:
    """The error if penalties and the request's own processors leave no token."""
    return RequestError(f"logits_processors and penalties leave no finite score for position {position}: give others")
