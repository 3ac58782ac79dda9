"""Not part of Resolute: importing it raises an error that names the replacement."""

from determined._gone import refuse

refuse(__name__)
