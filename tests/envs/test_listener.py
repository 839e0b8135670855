import socket

import pytest

from envs.listener import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reply_in_two_parts_does_not_wait_for_the_first_to_be_acknowledged(host):
    with listen(host, 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken_is_refused():
    with listen("127.0.0.1", 0) as listening, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listening.getsockname()[1])
