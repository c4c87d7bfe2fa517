"""Two thousand documents: most are fine, fifty are empty, and three kill their parser."""

import pyarrow as pa
import pyarrow.parquet as pq

COUNT = 2_000
KINDS = ("invoice", "letter", "report")
DEADLY = {777, 1111, 1555}


def text(n: int) -> str:
    if n % 40 == 0:
        return ""
    return f"{KINDS[n % 3]} number {n}" + (" %CRASH%" if n in DEADLY else "")


if __name__ == "__main__":
    names = [f"doc-{n:04}" for n in range(COUNT)]
    pq.write_table(
        pa.table({"doc_id": names, "text": list(map(text, range(COUNT)))}), "docs.parquet"
    )
    print(COUNT, "documents")
