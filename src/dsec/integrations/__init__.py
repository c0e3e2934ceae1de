"""DSec as a part of other projects: each module here is loaded by the project it is named after, and uses only the SDK."""
