"""Not part of Resolute: importing this says what to use instead."""

from determined._gone import refuse

refuse(__name__)
