"""What tasks there are. Importable by everyone: opens nothing, imports no handler."""

from dataclasses import dataclass
from uuid import UUID

import workq


@dataclass
class Welcome:
    user_id: UUID
    email: str


@dataclass
class Charge:
    order_id: int
    cents: int


WELCOME = workq.Spec("send-welcome", Welcome, queue="mail", key=lambda welcome: f"welcome:{welcome.user_id}")
CHARGE = workq.Spec("charge", Charge, queue="orders", key=lambda charge: f"order:{charge.order_id}")
CLEANUP = workq.Spec("cleanup")
