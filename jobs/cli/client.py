"""What a command needs to talk to the services, opened once."""

from dataclasses import dataclass

from jobs.broker import Tokens, make_app
from jobs.connection import connect
from jobs.ledger import Ledger
from jobs.settings import Settings, settings
from jobs.storage import Stores


@dataclass(frozen=True, slots=True)
class Client:
    settings: Settings
    ledger: Ledger
    stores: Stores
    tokens: Tokens


def open_client(given: Settings | None = None) -> Client:
    """Raises ServiceUnreachable, with the address, if the ledger's server does not answer."""
    config = given or settings()
    return Client(config, Ledger(connect(config.ledger_url)), Stores(config), Tokens(make_app(config)))
