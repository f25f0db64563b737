"""`s3://bucket/prefix?endpoint=https://…&region=…&timeout=5&requests=32`: any S3-compatible store.

Needs the extra: `pip install 'kvtide[s3]'`. Keys come from the environment (`AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`), from the role of the machine, or from the URL (`s3://key:secret@bucket`).
Without `endpoint` it is Amazon's own. An object is `prefix/kvtide/<space>/<key>`, both in
hexadecimal. What was acknowledged is as durable as the bucket is.

S3 evicts nothing: set a lifecycle rule that expires objects under `prefix/kvtide/` some days after
they were written. Looking for objects takes a request each, which costs money and milliseconds.

A call is split into requests, of which so many are in flight at once; they run on an event loop in
a thread of the store's own. At the time-out the remaining ones are cancelled, and the memory
is the caller's again: objects are copied out of it before they are sent, and into it only by tasks
that were not cancelled.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.store import S3Store as Bucket

from kvtide.storage.store import MISSING, Removed, StoreError, StoreStatus
from kvtide.storage.url import StoreURL

T = TypeVar("T")

REQUESTS = 32
RETRIES = 2
PAGE_OBJECTS = 1000
MAX_PAGES_COUNTED = 10
"""`status` counts objects up to so many pages of a listing."""

_FAILURES = (BaseError, OSError)
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write s3://key:secret@bucket"
_REMEDIES = {
    "NoSuchBucket": "create the bucket, or check its name and ?endpoint=",
    "InvalidAccessKeyId": f"the keys are wrong; {_KEYS}",
    "SignatureDoesNotMatch": f"the keys are wrong; {_KEYS}",
    "AccessDenied": "allow s3:ListBucket on the bucket and s3:GetObject, s3:PutObject and "
    "s3:DeleteObject on its objects",
    "PermanentRedirect": "the bucket is in another region; write ?region=",
    "AuthorizationHeaderMalformed": "the bucket is in another region; write ?region=",
    "QuotaExceeded": "delete objects from the bucket, or raise its quota",
}


class S3Store:
    def __init__(self, url: StoreURL, space: bytes) -> None:
        url.only("endpoint", "region", "timeout", "requests")
        self.name = str(url)
        self._timeout_s = url.seconds()
        self._bucket = _bucket(url, self._timeout_s)
        self._folder = f"kvtide/{space.hex()}/"
        self._requests = asyncio.Semaphore(url.count("requests", REQUESTS))
        self._failed = 0
        self._last_fault = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3", daemon=True)
        self._thread.start()
        try:
            self._run(self._within(self._first_page()))
        except BaseException:
            self.close()
            raise

    def lend(self, block: memoryview) -> None:
        """Nothing to register."""

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # -- objects ----------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._each(lambda n: obstore.head_async(self._bucket, self._path(keys[n])), keys)
        return [not isinstance(one, BaseException) for one in found]

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        async def read(n: int) -> int:
            found = await obstore.get_async(self._bucket, self._path(keys[n]))
            if found.meta["size"] > len(targets[n]):
                return MISSING
            content = await found.bytes_async()
            if len(content) > len(targets[n]):
                return MISSING
            targets[n][: len(content)] = memoryview(content)
            return len(content)

        assert len(keys) == len(targets)
        return [n if isinstance(n, int) else MISSING for n in self._each(read, keys)]

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        """HEAD before PUT, because not all servers support conditional writes."""

        async def write(n: int) -> None:
            path = self._path(keys[n])
            try:
                await obstore.head_async(self._bucket, path)
            except FileNotFoundError:
                content = bytes(sources[n])
                await obstore.put_async(self._bucket, path, content, use_multipart=False)

        assert len(keys) == len(sources)
        return [one is None for one in self._each(write, keys)]

    def remove(self, keys: Sequence[bytes]) -> int:
        distinct = list(dict.fromkeys(keys))
        there = [key for key, found in zip(distinct, self.exists(distinct), strict=True) if found]
        paths = [self._path(key) for key in there]
        self._run(self._within(self._delete(paths)))
        return len(paths)

    # -- the space --------------------------------------------------------------------------

    def clear(self) -> Removed:
        """The time-out is for every thousand objects, not for all of them."""
        return self._run(self._clear())

    async def _clear(self) -> Removed:
        objects = size = 0
        pages = aiter(obstore.list(self._bucket, self._folder, chunk_size=PAGE_OBJECTS))
        while page := await self._within(_next_page(pages)):
            await self._within(self._delete([one["path"] for one in page]))
            objects += len(page)
            size += sum(one["size"] for one in page)
        return Removed(objects, size)

    def status(self) -> StoreStatus:
        sizes, whole = self._run(self._within(self._sizes()))
        notes = []
        if not whole:
            notes.append(f"there are more than {len(sizes):,} objects; listing all takes long")
        if self._failed:
            notes.append(f"{self._failed:,} requests failed, the last one: {self._last_fault}")
        if not whole:
            return StoreStatus(notes=tuple(notes))
        return StoreStatus(len(sizes), sum(sizes), notes=tuple(notes))

    async def _sizes(self) -> tuple[list[int], bool]:
        sizes: list[int] = []
        pages = aiter(obstore.list(self._bucket, self._folder, chunk_size=PAGE_OBJECTS))
        for _ in range(MAX_PAGES_COUNTED + 1):
            page = await _next_page(pages)
            if not page:
                return sizes, True
            sizes += [one["size"] for one in page]
        return sizes, False

    async def _first_page(self) -> None:
        """Fails if anything is wrong with bucket, keys or endpoint."""
        await _next_page(aiter(obstore.list(self._bucket, self._folder, chunk_size=1)))

    async def _delete(self, paths: list[str]) -> None:
        for start in range(0, len(paths), PAGE_OBJECTS):
            await obstore.delete_async(self._bucket, paths[start : start + PAGE_OBJECTS])

    # -- requests ---------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        return f"{self._folder}{key.hex()}"

    def _each(
        self, request: Callable[[int], Awaitable[T]], keys: Sequence[bytes]
    ) -> list[T | BaseException]:
        """A request for every key. Failures are results, unless nothing else came back."""

        async def one(n: int) -> T:
            async with self._requests:
                return await request(n)

        async def all_of_them() -> list[T | BaseException]:
            return await asyncio.gather(*map(one, range(len(keys))), return_exceptions=True)

        results = self._run(self._within(all_of_them()))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _FAILURES):
                raise result
        faults = [one for one in results if isinstance(one, _FAILURES) and not _is_missing(one)]
        if faults:
            self._failed += len(faults)
            self._last_fault = " ".join(_short(faults[-1]).split())
        if faults and len(faults) == len(results):
            raise self._refusal(faults[0]) from faults[0]
        return results

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wait_for(work, self._timeout_s)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TimeoutError as error:
            raise StoreError(
                f"storage {self.name}: no answer within {self._timeout_s:g} s; see whether the "
                "endpoint is reachable, or write ?timeout= with more seconds if it is only slow"
            ) from error
        except _FAILURES as error:
            raise self._refusal(error) from error

    def _refusal(self, error: BaseException) -> StoreError:
        text = _short(error)
        code = re.search(r"<Code>(\w+)</Code>", text)
        if code:
            problem, remedy = code[1], _REMEDIES.get(code[1], "see the log of the server")
        elif isinstance(error, PermissionDeniedError) or "403 Forbidden" in text:
            problem, remedy = "access denied", _REMEDIES["AccessDenied"]
        elif "169.254." in text or "credential" in text:
            problem, remedy = "no keys were found", _KEYS
        else:
            problem = " ".join(text.split())[-120:]
            remedy = "check ?endpoint= and that the server runs"
        return StoreError(f"storage {self.name}: {problem}: {remedy}")


def _bucket(url: StoreURL, timeout_s: float) -> Bucket:
    endpoint = url.settings.get("endpoint")
    if not url.host:
        raise StoreError(f"storage {url}: no bucket; write s3://bucket/prefix")
    if endpoint is not None and not re.match(r"https?://\S", endpoint):
        raise StoreError(f"storage {url}: endpoint={endpoint} is no URL; write http://host:port")
    config: dict[str, Any] = {
        "endpoint": endpoint,
        "region": url.settings.get("region") or ("us-east-1" if endpoint else None),
        "access_key_id": url.user or None,
        "secret_access_key": url.password or None,
    }
    patience = timedelta(seconds=timeout_s)
    return Bucket(
        url.host,
        prefix=url.path.strip("/") or None,
        config={name: value for name, value in config.items() if value},  # type: ignore[arg-type]
        client_options={
            "allow_http": True,
            "timeout": patience,
            "connect_timeout": patience,
            "pool_idle_timeout": timedelta(seconds=30),
        },
        retry_config={"max_retries": RETRIES, "retry_timeout": patience},
    )


async def _next_page(pages: Any) -> Sequence[Any]:
    return await anext(pages, [])


def _short(error: BaseException) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _is_missing(error: BaseException) -> bool:
    """A bucket that is gone is a fault of all requests, not an object that is missing."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)
