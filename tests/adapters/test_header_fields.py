"""Header fields of a mail: an encoded word in caller text stays text, and the composed mail has
exactly the given fields and bodies."""

import random
from email import message_from_bytes
from email.policy import default
from typing import Any

import pytest

from holdfast.adapters import email, header_fields
from holdfast.adapters.email import Mail
from holdfast.errors import Invalid

MODULES = ("holdfast.adapters.header_fields", "holdfast.adapters.email")

ME = "robot@example.org"
# Encoded words that contain a line break and further header fields, or the end of the header.
ENCODED_WORDS = [
    "=?utf-8?q?a=0D=0ABcc:_victim@x.org?=",
    "=?utf-8?q?a=0ABcc:_victim@x.org=0A=0Abody?=",
    "=?utf-8?b?YQ0KQmNjOiB2aWN0aW1AeC5vcmcNCg0KYm9keQ==?=",
    "=?utf-8?q?=0D=0A=0D=0Anew_body?=",
    "=?UTF-8?Q?x=0D=0AX-Evil:_1?= =?utf-8?q?=0D=0AX-Evil:_2?=",
    "plain =?iso-8859-1?q?x=0AX-Evil:_1?= plain",
    "=?utf-8*en?q?x=0AX-Evil:_1?=",
    "=?utf-7?q?x+AA0ACg-X-Evil: 1?=",
    "x" * 80 + " =?utf-8?q?" + "y=0AX-Evil:_1" * 9 + "?=",
    "é =?utf-8?q?x=0D=0AX-Evil:_1?=",
    "=?utf-8?q?x=E2=80=A8X-Evil:_1?=",
    "=?utf-8?q?x=0B=0C=1C=85X-Evil:_1?=",
]


def compose_mail(subject: str = "s", body: str = "b\n", **options: Any) -> bytes:
    return email.compose(ME, ["a@x.org"], subject, body, Mail(**options), key="k")


def field_names(mail: bytes) -> list[str]:
    return list(message_from_bytes(mail, policy=default).keys())


@pytest.mark.parametrize("text", ENCODED_WORDS)
def test_an_encoded_word_in_a_subject_stays_text(text: str) -> None:
    mail = compose_mail(text)
    assert field_names(mail) == field_names(compose_mail("s"))
    read = message_from_bytes(mail, policy=default)
    assert read["Subject"] == text
    assert read.get_content().splitlines() == ["b"]


@pytest.mark.parametrize("text", ENCODED_WORDS)
def test_encoded_word_in_a_custom_header_stays_text(text: str) -> None:
    mail = compose_mail(headers={"X-Ticket": text, "X-Other": "1"}, html="<b>b</b>")
    assert field_names(mail) == field_names(
        compose_mail(headers={"X-Ticket": "7", "X-Other": "1"}, html="b")
    )
    read = message_from_bytes(mail, policy=default)
    assert read["X-Ticket"] == text
    assert [part.get_content().strip() for part in read.iter_parts()] == ["b", "<b>b</b>"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", ["to", "sender", "cc", "bcc", "reply_to"])
def test_an_address_with_the_start_of_an_encoded_word_is_refused(at: str) -> None:
    address = "=?utf-8?q?a=0ABcc?=@x.org"
    options: dict[str, Any] = {at: (address,) if at in ("cc", "bcc") else address}
    sender, to = options.pop("sender", ME), [options.pop("to", "a@x.org")]
    with pytest.raises(Invalid):
        email.compose(sender, to, "s", "b", Mail(**options), key="k")


def test_header_in_two_spellings_is_refused() -> None:
    with pytest.raises(Invalid):
        compose_mail(headers={"X-A": "1", "x-a": "2"})


@pytest.mark.parametrize("text", ["\ud800", "a\udc0a"])
def test_text_with_surrogates_is_refused(text: str) -> None:
    for given in ({"subject": text}, {"body": text}, {"html": text}, {"headers": {"X-A": text}}):
        with pytest.raises(Invalid):
            compose_mail(**given)  # type: ignore[arg-type]


LETTERS = [
    "a",
    "B",
    " ",
    "  ",
    "=?",
    "?=",
    "=?utf-8?q?",
    "=0A",
    "é",
    "漢",
    "😀",
    ":",
    ",",
    "x" * 70,
]


def test_any_text_is_decoded_unchanged_without_extra_fields() -> None:
    drawn = random.Random(15)
    expected = field_names(compose_mail(headers={"X-A": "1"}, html="h"))
    for _ in range(400):
        subject, header, body, html = (
            "".join(drawn.choices([*LETTERS, *extra], k=drawn.randrange(14)))
            for extra in ([], [], ["\n", ".", "--"], ["\r\n", "From ", "\r"])
        )
        mail = compose_mail(subject, body, headers={"X-A": header}, html=html)
        assert field_names(mail) == expected
        lines = mail.split(b"\r\n\r\n")[0].split(b"\r\n")
        assert all(line.strip() and len(line) <= 998 for line in lines)
        assert all(len(line) <= 78 for line in lines if b"=?" in line)
        # Compare with the parsed mail. The parser may strip outer white space.
        read = message_from_bytes(mail, policy=default)
        for name, text in (("Subject", subject), ("X-A", header)):
            assert read[name].strip() == text.strip()


def test_a_long_list_of_recipients_is_folded_between_addresses() -> None:
    to = [f"somebody-{n}@example.org" for n in range(100)]
    mail = email.compose(ME, to, "s", "b", Mail(), key="k")
    assert all(len(line) <= 78 for line in mail.split(b"\r\n"))
    read = message_from_bytes(mail, policy=default)
    assert [str(address) for address in read["To"].addresses] == to


@pytest.mark.parametrize(
    "finished",
    [
        b"Subject: s\r\nBcc: x@y.org\r\n",
        b"Subject: other\r\n",
        b"Subject: s\r\nSubject: s\r\n",
        b"",
        b"Subject: s\r\n\r\n",
        b"Subject: s\n",
        b"Subject: s\rX-Evil: 1\r\n",
        b"subject: s\r\n",
    ],
)
def test_check_mail_refuses_other_header_fields(finished: bytes) -> None:
    rest = compose_mail().partition(b"\r\nContent-Type")[2]
    with pytest.raises(Invalid):
        header_fields.check_mail(finished + b"Content-Type" + rest, [("Subject", "s")], ["b"])


def test_check_mail_refuses_another_body() -> None:
    mail = (
        header_fields.encode_field("Subject", "s")
        + b"Content-Type"
        + (compose_mail().partition(b"\r\nContent-Type")[2])
    )
    header_fields.check_mail(mail, [("Subject", "s")], ["b"])
    for texts in (["c"], ["b", "b"], []):
        with pytest.raises(Invalid):
            header_fields.check_mail(mail, [("Subject", "s")], texts)
