"""An error in OpenAI's form, which their client and those that copy it understand."""

from __future__ import annotations

from starlette.responses import JSONResponse


class ApiProblem(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP. OpenAI's client tries 408, 409, 429 and those from 500 on again.
        message: for people.
        param: the field it is about, as `messages[0].content`.
        code: a word for programs.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, headers=self.headers)


def bad(param: str | None, message: str, code: str = "invalid_value") -> ApiProblem:
    """A field that has to change."""
    return ApiProblem(400, f"{param}: {message}" if param else message, param, code)
