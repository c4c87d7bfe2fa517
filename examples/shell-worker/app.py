"""An app whose workers are external: it stores the tasks, and shell scripts run them."""

import holdfast as hf

app = hf.App("shell")
