"""Exceptions that the machine, the network or a storage causes, in one line with the likely fix.

The one table of such exceptions. Everything else is a bug and keeps its traceback.
"""

import errno
import socket
import ssl
import urllib.error
from collections.abc import Mapping

# Packages whose exceptions say that a remote storage refused or could not be reached. Most of them are not OSErrors:
# s3fs 2026.9 passes on botocore's, gcsfs 2026.10 google.auth's, both aiohttp's; huggingface_hub 2.4 httpx2's.
_REMOTE_PACKAGES = ("botocore", "aiobotocore", "gcsfs", "google", "aiohttp", "httpx", "httpx2", "httpcore", "requests")

_CREDENTIALS = "; check the credentials of the storage and their rights"
_NETWORK = "; check the network"
_S3_NETWORK = "; check the network and AWS_ENDPOINT_URL"

# As s3fs 2026.9 raises what an S3 answers with 409, 500 or 503, without the name of the object.
_BUSY = (errno.EBUSY, errno.EREMOTEIO)

# Errors of the network, or of a file system that is mounted over it; none of them is a ConnectionError.
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENOTCONN)

# An HTTP server may answer the next time after these, as after those from 500 on.
_PASSING_STATUS = (408, 425, 429)

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

# Fixes for errors of the operating system.
_FIXES = {
    **dict.fromkeys(
        _FULL_DISK, "; free space there, or use another disk (runtime.storage; TMPDIR for temporary files)"
    ),
    errno.EROFS: "; choose a place that can be written",
    errno.EISDIR: "; expected a file, not a folder",
    errno.ENOTDIR: "; a part of the path is a file, not a folder",
    errno.EEXIST: "; move away what is there",
    errno.ENAMETOOLONG: "; shorten the name",
    errno.ELOOP: "; a symbolic link leads back to itself",
    errno.EMFILE: "; raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "; raise the limit on open files (`ulimit -n`)",
    **dict.fromkeys(_BUSY, "; the storage is overloaded or down"),
    errno.EIO: "; check the disk or its mount",
    **dict.fromkeys(_UNREACHABLE, _NETWORK),
    errno.ESTALE: "; mount the network file system again",
}

# Parts of the class names of errors that wrong settings cause.
_WRONG_SETTINGS = ("ProfileNotFound", "ParamValidation", "InvalidURL", "InvalidSchema", "MissingSchema")

# Classes of botocore and google.auth.
_CREDENTIALS_NOT_FOUND = ("NoCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError")

# Fixes for errors of remote storages, by a part of the exception's class name; the first that occurs counts.
_REMOTE_FIXES = {
    "ProfileNotFound": "; set AWS_PROFILE to a profile of ~/.aws/config, or unset it",
    "ParamValidation": "; check the name of the bucket",
    "InvalidURL": "; check the URL",
    "SSL": "; check the certificate of the endpoint (SSL_CERT_FILE, AWS_CA_BUNDLE)",
    "Certificate": "; check the certificate of the endpoint (SSL_CERT_FILE, AWS_CA_BUNDLE)",
    "Credential": _CREDENTIALS,
    "Token": _CREDENTIALS,
    "Connect": _NETWORK,
    "Endpoint": _NETWORK,
    "Timeout": _NETWORK,
    "DNS": _NETWORK,
}


_STATUS_OF_MISSING = (404, 410)  # not there, no longer there
# Others about one file: being written, changed meanwhile, shorter than what was asked for.
_STATUS_OF_FILE = (*_STATUS_OF_MISSING, 409, 412, 416)

# Codes of S3 about what a request is signed with. The answer to HEAD has no code, and botocore gives its status
# instead.
_CREDENTIAL_CODES = (
    "400",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "401",
    "403",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
)

# The operating system's words for a full disk: all that Rust libraries (safetensors) and Ray Data keep of the error.
_DISK_WORDS = ("No space left on device", "Disk quota exceeded")


def disk_is_full(error: BaseException) -> bool:
    """Whether the error, of whatever class, says that a disk is full."""
    return any(words in str(error) for words in _DISK_WORDS)


def is_fault(error: BaseException) -> bool:
    """Whether the machine, the network or a storage caused the error."""
    # A subclass, such as ClientConnectorError, may be an OSError and of a package at the same time.
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _REMOTE_PACKAGES


def refuses_access(error: BaseException) -> bool:
    """Whether a storage refuses to be read as it is set up; what is stored may be whole. See `find_refusal`."""
    return find_refusal(error) is not None


def find_refusal(error: BaseException) -> BaseException | None:
    """The first of an error and its causes that reports wrong rights, credentials or settings, or None."""
    chain: BaseException | None = error
    while chain is not None:
        is_remote = type(chain).__module__.partition(".")[0] in _REMOTE_PACKAGES or is_forbidden_by_gcs(chain)
        is_about_file = _status_of(chain) in _STATUS_OF_FILE
        if isinstance(chain, PermissionError) or (is_remote and is_permanent(chain) and not is_about_file):
            return chain
        # Also a context that `from None` hides from readers, as `urls.storage_errors` does.
        chain = chain.__cause__ or chain.__context__
    return None


def is_forbidden_by_gcs(error: BaseException) -> bool:
    """Whether Google Cloud Storage refuses a request for lack of rights: gcsfs 2026.10 raises a plain OSError then."""
    if type(error) is not OSError or error.errno is not None:
        return False
    text = str(error)
    # The others are about files that may not be deleted.
    return text.startswith("Forbidden: ") or '"code": 403' in text or text.endswith(": 403")


def is_missing(error: BaseException) -> bool:
    """Whether a web server says that it has no such file. Storages say the same of a missing bucket or repository."""
    return type(error).__module__.startswith("aiohttp.") and _status_of(error) in _STATUS_OF_MISSING


def error_text(error: BaseException) -> str:
    """The error's own text, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A first line that ends in a colon says nothing without the next one, nor does gcsfs's, which is the URL.
    return " ".join(lines[:2]) if lines[0].endswith(":") or is_forbidden_by_gcs(error) else lines[0]


def error_file(error: BaseException, url: str) -> str:
    """The file that the error names, to append to its reason, unless the URL is that file."""
    filename = getattr(error, "filename", None)
    return f": {filename}" if filename and str(filename).rstrip("/") not in url else ""


def fix_hint(error: BaseException, url: str = "") -> str:
    """The likely fix, to append to a message, or nothing.

    Args:
        url: what could not be used, if it is known.
    """
    # s3fs 2026.9 makes this of every error of a storage that it does not know.
    if isinstance(error, OSError) and error.errno == errno.EIO and "://" in url:
        return ""
    text = _general_fix(error)
    is_s3 = url.startswith(("s3://", "s3a://")) or type(error).__module__.startswith(("botocore", "aiobotocore"))
    return _S3_NETWORK if text == _NETWORK and is_s3 else text


def _general_fix(error: BaseException) -> str:
    if isinstance(error, PermissionError):
        return _CREDENTIALS if error.filename is None else "; check the permissions of the file and of its folder"
    if isinstance(error, OSError) and error.errno in _FIXES:
        return _FIXES[error.errno]
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return _NETWORK
    name = type(error).__name__
    for part, text in _REMOTE_FIXES.items():
        if part in name:
            return text
    is_of_gcs = is_forbidden_by_gcs(error) or type(error).__module__.partition(".")[0] in ("gcsfs", "google")
    is_refused_by_gcs = is_of_gcs and _status_of(error) in (401, 403)
    return _CREDENTIALS if is_about_credentials(error) or is_refused_by_gcs else ""


def is_about_credentials(error: BaseException) -> bool:
    """Whether S3 refuses, as its code says, what the request was signed with."""
    response = getattr(error, "response", None)
    return isinstance(response, Mapping) and response.get("Error", {}).get("Code") in _CREDENTIAL_CODES


def is_permanent(error: BaseException) -> bool:
    """Whether another try would end in the same way: nothing is there, the rights are missing, a setting is wrong.

    Errors that are neither permanent nor transient, such as a ValueError, are bugs: nothing is known of another try.
    """
    name = type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        return True
    # Credentials that were not found may be there in a moment: pods get them from a server of their node.
    if name in _CREDENTIALS_NOT_FOUND:
        return False
    status = _status_of(error)
    if status is not None:
        return status < 500 and status not in _PASSING_STATUS
    return _is_certificate_error(error) or any(part in name for part in (*_WRONG_SETTINGS, "Credential", "Token"))


def _status_of(error: BaseException) -> int | None:
    """The HTTP status with which a server refused, wherever a library keeps it; None of other errors."""
    if is_forbidden_by_gcs(error):
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore 1.43
        if response.get("Error", {}).get("Code") == "RequestTimeout":
            return 408  # which S3 sends as 400
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # requests, httpx2
        found = getattr(response, "status_code", None)
    else:  # urllib and gcsfs 2026.10, aiohttp
        found = getattr(error, "code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) and found >= 300 else None


def _is_certificate_error(error: BaseException) -> bool:
    """Whether a server's certificate is not trusted. Other errors of SSL, such as an early end, may pass."""
    return isinstance(error, ssl.SSLCertVerificationError) or "certificate_verify_failed" in str(error).lower()


def is_transient(error: BaseException) -> bool:
    """Whether another try may well succeed: a storage or the network did not answer as it should.

    Of errors that are neither, see `is_permanent`.
    """
    if is_permanent(error):
        return False
    if _status_of(error) is not None:
        return True
    if isinstance(error, urllib.error.URLError):
        # A reason without an exception is of an address that is none.
        return isinstance(error.reason, Exception) and not is_permanent(error.reason)
    is_remote = type(error).__module__.partition(".")[0] in _REMOTE_PACKAGES
    has_passing_number = getattr(error, "errno", None) in (*_BUSY, *_UNREACHABLE, errno.EIO, errno.ESTALE)
    is_network_error = isinstance(error, ConnectionError | TimeoutError | socket.gaierror)
    return is_remote or has_passing_number or is_network_error


def describe(error: BaseException) -> str | None:
    """The line for an error that nobody closer to its cause has described, or None if it is a bug."""
    if not is_fault(error) and not disk_is_full(error):
        return None
    name = getattr(error, "filename", None) or type(error).__name__
    fix = fix_hint(error)
    if getattr(error, "errno", None) in _BUSY:
        name = "a storage"
    elif disk_is_full(error) and getattr(error, "filename", None) is None:
        # A write to an open file does not say which one, and safetensors 0.8 and pyarrow 26 never do.
        name, fix = "a disk", "; free space in runtime.storage and in TMPDIR, or choose others"
    again = "; run the same command again to continue" if is_transient(error) else ""
    # A name may be too long for a message, and the reason stands after it.
    return f"{name!s:.300}: {error_text(error)}{fix}{again}; POS2DISTILL_DEBUG=1 shows the traceback"
