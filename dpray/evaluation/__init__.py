"""The evaluation measures synthetic records against real ones; it is not differentially private."""

NOT_FOR_RELEASE = "computed from private data; not for release"
