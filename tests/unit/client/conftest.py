"""An address for engines that tests script, both clients, and an event loop for tests that are coroutines."""

import asyncio
import inspect
import threading

import pytest

from caesura.client import AsyncSchedulerClient, SchedulerClient


@pytest.fixture
def endpoint(tmp_path_factory):
    return f"ipc://{tmp_path_factory.mktemp('s')}/s"


class Driven:
    """An object of coroutines, used as its blocking twin is; ``loop`` runs in a thread."""

    def __init__(self, loop, value):
        self._loop, self._value = loop, value

    def __getattr__(self, name):
        found = getattr(self._value, name)
        return (
            (lambda *given, **options: self._result(found(*given, **options))) if callable(found) else found
        )

    def _result(self, value):
        if inspect.isawaitable(value):
            value = asyncio.run_coroutine_threadsafe(_awaited(value), self._loop).result()
        return (
            Driven(self._loop, value)
            if hasattr(type(value), "__aiter__") or hasattr(value, "__aenter__")
            else value
        )

    def __iter__(self):
        each = aiter(self._value)
        return iter(lambda: self._result(anext(each, None)), None)

    def __next__(self):
        return self._result(anext(self._value))

    def __enter__(self):
        entered = self._result(self._value.__aenter__())
        return self if entered is self._value else entered

    def __exit__(self, *raised):
        return self._result(self._value.__aexit__(*raised))


async def _awaited(value):
    return await value


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request):
    if request.param == "blocking":
        yield SchedulerClient
        return
    with asyncio.Runner(debug=True) as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def made(*given, **options):
            return AsyncSchedulerClient(*given, **options)

        yield lambda *given, **options: Driven(loop, None)._result(made(*given, **options))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given), debug=True)
    return True
