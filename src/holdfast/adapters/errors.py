"""Errors of built-in effects. The class determines whether the effect is retried, and whether it
may have happened.

    Refused                 (runner.error_policy) never retried
    ├── ForbiddenAddress    the guard does not allow the request
    ├── RejectedByServer    the server answered with an error
    ├── TlsNotTrusted       the certificate is not trusted
    ├── BadResponse         the effect happened, but the response is unusable
    │   └── ResponseTooLarge
    ├── OverBudget          the budget is exhausted
    ├── NotConfigured       an operator must configure the endpoint or a price
    └── NotInstalled        an operator must install an extra
    Busy                    (errors) retried
    ├── Unavailable         nothing happened: no connection, or the server asks to wait
    ├── Interrupted         the connection broke after the start: the effect may have happened
    └── BudgetReserved      the rest of the budget is reserved by running calls

`Unavailable` carries `retry_after_s` if the server sent a delay.
"""

from __future__ import annotations

from holdfast.errors import Busy
from holdfast.runner.error_policy import Refused


class ForbiddenAddress(Refused):
    code = "forbidden_address"
    hint = "an operator can allow the address; see hf.http.Reach"


class RejectedByServer(Refused):
    code = "error_status"


class TlsNotTrusted(Refused):
    code = "untrusted_certificate"
    hint = "if the certificate is right, set ca_file to the certificate of its authority"


class BadResponse(Refused):
    code = "bad_answer"


class ResponseTooLarge(BadResponse):
    code = "answer_too_large"


class OverBudget(Refused):
    code = "over_budget"
    hint = "raise the limit of the named budget, or wait until an operator raises it"


class NotConfigured(Refused):
    code = "not_configured"


class NotInstalled(Refused):
    code = "not_installed"
    hint = "pip install 'holdfast[ops]'"


class Unavailable(Busy):
    code = "unavailable"


class Interrupted(Busy):
    code = "interrupted"


class BudgetReserved(Busy):
    code = "budget_reserved"
