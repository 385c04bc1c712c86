"""The state of a Slurm job."""

import re
import subprocess
from dataclasses import dataclass, replace


def ask_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class State:
    """The state of a job, as Slurm's controller reports it."""

    name: str = ""
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    ended: bool = False

    def __str__(self) -> str:
        more = self.nodes if self.name == "RUNNING" else self.reason if self.name == "PENDING" else ""
        return f"{self.name.lower()}{f' ({more})' if more not in ('', 'None', '(null)') else ''}"

    @classmethod
    def ask(cls, number: str, former: "State") -> "State":
        """Ask the controller, which needs no accounting; it forgets a job minutes after its end."""
        answer = ask_slurm("scontrol", "show", "job", "--oneliner", number)
        if answer.returncode:
            if "Invalid job id" not in answer.stderr:
                return former  # it may be asked again
            return replace(former, name=former.name if former.ended else "forgotten", ended=True)
        fields = dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
        name = fields.get("JobState", "")
        return cls(
            name=name,
            reason=fields.get("Reason", ""),
            nodes=fields.get("NodeList", ""),
            restarts=int(fields.get("Restarts", 0)),
            ended=name not in GOING_ON,
        )


# A job in any other state has ended.
GOING_ON = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
