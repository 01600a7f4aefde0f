from typing import Any

ACT2FN: dict[str, Any]
