"""A user's module whose own import fails."""

import no_such_package_anywhere  # noqa: F401
