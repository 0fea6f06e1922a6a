"""`HOST:PORT`, and lists of them: `10.0.0.1:29400,[fd00::2]:29400`."""

from dataclasses import dataclass

from trainers.elastic.wire.wire_errors import AddressError

MOST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which an anchor or a peer listens."""

    host: str
    """A name or an IP address, an IPv6 address without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read one `HOST:PORT`. An IPv6 address stands in brackets."""
        text = text.strip()
        if text.startswith("["):
            host, bracket, port = text[1:].partition("]")
            if not bracket:
                raise AddressError(f"{text!r} has no closing bracket: write [HOST]:PORT")
            if ":" not in host:
                raise AddressError(f"{text!r}: only an IPv6 address stands in brackets")
            colon, port = port[:1], port[1:]
        else:
            host, colon, port = text.rpartition(":")
            if ":" in host:
                raise AddressError(f"{text!r} has several colons: write [{text}]:PORT for IPv6")
        if colon != ":" or not port:
            raise AddressError(f"{text!r} has no port: write HOST:PORT")
        if not host or any(letter.isspace() for letter in host):
            raise AddressError(f"{text!r} has no host: write HOST:PORT")
        if not (port.isascii() and port.isdigit()):
            raise AddressError(f"{text!r}: the port {port!r} is no number")
        if len(port) > 5 or not 0 < int(port) <= MOST_PORT:
            raise AddressError(f"{text!r}: the port {port} is not between 1 and {MOST_PORT}")
        return cls(host, int(port))


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Read `HOST:PORT[,HOST:PORT...]`. Duplicates are refused."""
    if not text.strip():
        raise AddressError("no address is given: write HOST:PORT[,HOST:PORT...]")
    parts = text.split(",")
    if any(not part.strip() for part in parts):
        raise AddressError(f"{text!r} has an empty address: take the comma away")
    addresses = tuple(Address.parse(part) for part in parts)
    keys = [(address.host.lower(), address.port) for address in addresses]
    doubles = [str(a) for i, a in enumerate(addresses) if keys[i] in keys[:i]]
    if doubles:
        raise AddressError(f"{text!r} names {', '.join(doubles)} twice: name each address once")
    return addresses
