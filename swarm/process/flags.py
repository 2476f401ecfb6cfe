"""The flags that both servers have, spelled once."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

HttpHost: TypeAlias = Annotated[str, typer.Option(help="Address of /metrics and /healthz.")]
Insecure: TypeAlias = Annotated[bool, typer.Option(help="Allow plaintext off loopback.")]
LogLevel: TypeAlias = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogFormatName: TypeAlias = Annotated[str, typer.Option(help="auto, json or text.")]
