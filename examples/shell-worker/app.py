"""An app whose workers are all elsewhere: it holds the tasks, and shell scripts do them."""

import holdfast as hf

app = hf.App("shell")
