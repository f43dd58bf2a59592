"""stepmark train MODEL...: real training steps, distributed and accelerated as options say."""

from stepmark.cli.flags import verb
from stepmark.core.train_options import TrainOptions

command = verb(
    TrainOptions,
    "stepmark.app.train:run",
    "Train for real: steps of single, DDP, FSDP, TP, PP by phase, MFU by convention.",
)
