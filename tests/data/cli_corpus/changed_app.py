"""The application of the corpus with one changed handler. Its replay differs from the stored journals."""

from __future__ import annotations

import corpus_app

import holdfast as hf


class Meter(corpus_app.Meter):
    @hf.on(corpus_app.ReadingTaken)
    def reading_taken(self, event: corpus_app.ReadingTaken, cx: hf.Context) -> None:
        self.total += 2 * event.value


app = hf.App("grid", worlds=[Meter], effects=[corpus_app.charge, corpus_app.print_letter])
