"""`accelerate launch -m medusa.train --config FILE [section.key=value ...]`."""

from medusa.cli import train_main

train_main()
