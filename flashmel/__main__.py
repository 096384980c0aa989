"""``python -m flashmel``."""

from .cli import main

raise SystemExit(main())
