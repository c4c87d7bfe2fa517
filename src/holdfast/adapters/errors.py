"""How a shipped effect fails. The class says whether it is tried again, and whether it happened.

    Refused                 (runner.faults) never tried again
    ├── Forbidden           the guard does not let it out
    ├── Answered            the other side answered with an error
    ├── Untrusted           its certificate is not the one we trust
    ├── BadAnswer           it was done, but the answer cannot be used
    │   └── AnswerTooLarge
    ├── OverBudget          there is no money left for it
    ├── NotConfigured       an operator has to say where, or at what price
    └── NotInstalled        an operator has to install an extra
    Busy                    (errors) tried again
    ├── Unavailable         nothing was done: no connection, or the other side asks to wait
    ├── Interrupted         it broke off after it began: it may have been done
    └── BudgetReserved      what is left is reserved by calls in flight

`Unavailable` carries `retry_after_s` when the other side named a time.
"""

from __future__ import annotations

from holdfast.errors import Busy
from holdfast.runner.faults import Refused


class Forbidden(Refused):
    code = "forbidden_address"
    hint = "an operator may allow it; see hf.http.Reach"


class Answered(Refused):
    code = "error_status"


class Untrusted(Refused):
    code = "untrusted_certificate"
    hint = "if the certificate is right, name its authority in ca_file"


class BadAnswer(Refused):
    code = "bad_answer"


class AnswerTooLarge(BadAnswer):
    code = "answer_too_large"


class OverBudget(Refused):
    code = "over_budget"
    hint = "raise the limit of the budget it names, or wait until it is raised"


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
