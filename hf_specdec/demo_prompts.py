"""The dozen requests of `hf-specdec demo`: what users ask, from free chat to edits that copy most of their input."""

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    """One request: the kind of work and the user's message."""

    kind: str
    text: str


MEETING_NOTES = """\
Minutes, harbour committee, 4 March. Present: Ines Duarte (chair), Tom Feld, Priya Nair, Lars Holm. Ines opened the \
meeting at 18:05. Tom reported that the east pier needs new planks along forty metres and that the old estimate of \
9,000 euros no longer holds; two quotes came in at 12,400 and 13,100 euros. Priya asked whether the work could wait \
until autumn. Lars said that the insurance expires on 30 June and that the pier must be closed if it is not repaired \
by then. The committee voted to accept the quote of 12,400 euros. Priya will apply for the city's coastal grant, \
which covers up to a third of the cost. Next meeting: 8 April, 18:00."""

BAKERY_REVIEW = """\
i went to the new bakery on mill street on saturday and i has to say the bread were amazing. the lady behind the \
counter telled us that they bake every two hour so its always fresh. we buyed a rye loaf, two cinnamon bun and a \
coffee, it costed only nine euro. the only bad thing are the queue, we was waiting for twenty minute outside in the \
rain. next time i will went there earlyer."""

CART_CODE = """\
class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        self.items.append((name, price, count))

    def remove(self, name):
        self.items = [item for item in self.items if item[0] != name]

    def total(self):
        result = 0
        for name, price, count in self.items:
            result = result + price * count
        return result

    def is_empty(self):
        return len(self.items) == 0"""

SETTINGS_JSON = """\
{
  "name": "weather-station",
  "interval_seconds": 60,
  "sensors": [
    {"id": "roof", "kind": "temperature", "unit": "celsius", "enabled": true},
    {"id": "garden", "kind": "humidity", "unit": "percent", "enabled": true},
    {"id": "shed", "kind": "pressure", "unit": "hectopascal", "enabled": false}
  ],
  "upload": {"url": "https://example.org/upload", "retries": 3}
}"""

ORDERS = """\
Order 1041, Maria Lopez, maria.lopez@example.com: two desk lamps, delivered to Porto on 3 May.
Order 1042, John Abara, j.abara@example.com: one office chair, delivered to Lagos on 9 May.
Order 1043, Yuki Tanaka, yuki@example.org: three notebooks and a pen set, delivered to Kobe on 4 May.
Order 1044, Anna Svensson, anna.s@example.net: one standing desk, delivered to Malmo on 12 May."""

PRESS_RELEASE = """\
The Lindqvist Museum of Glass will reopen on 14 September after two years of renovation. The new east wing adds six \
galleries and a workshop in which visitors can watch glass being blown every afternoon. The opening exhibition, \
"Sand and Fire", shows 140 pieces from twelve countries, among them a Roman bowl that has never been on public \
display. Admission is free for children under twelve. Tickets can be booked on the museum's website from 1 August."""

# The kinds alternate, so that any first part of the list is a fair mixture.
PROMPTS = (
    DemoPrompt("chat", "Give me five tips for learning to cook as a beginner. Explain each in a sentence or two."),
    DemoPrompt(
        "code edit", f"Rename the method `add` to `add_item`. Return the whole class.\n\n```python\n{CART_CODE}\n```"
    ),
    DemoPrompt("summarising", f"Summarise these minutes in three sentences.\n\n{MEETING_NOTES}"),
    DemoPrompt("rewriting", f"Correct the grammar and spelling of this text. Change nothing else.\n\n{BAKERY_REVIEW}"),
    DemoPrompt(
        "maths",
        "A train covers 180 km in 2 hours, then 150 km in 1.5 hours. What is its average speed? Show each step.",
    ),
    DemoPrompt(
        "extraction",
        "Turn these orders into a list with one entry for each order, with its number, customer, e-mail address, "
        f"goods, city and date.\n\n{ORDERS}",
    ),
    DemoPrompt("chat", "Write a short, friendly message that invites my neighbours to a street party on Saturday."),
    DemoPrompt("rewriting", f"Repeat this press release, with Lindqvist replaced by Larsen.\n\n{PRESS_RELEASE}"),
    DemoPrompt("maths", "Write the multiplication table of 7 from 7 x 1 to 7 x 15, one product per line."),
    DemoPrompt(
        "code edit",
        f"Change `interval_seconds` to 30 in this JSON file and print the new file.\n\n```json\n{SETTINGS_JSON}\n```",
    ),
    DemoPrompt("summarising", f"List every decision in these minutes, quoting the words used.\n\n{MEETING_NOTES}"),
    DemoPrompt("chat", "Explain to a ten-year-old why the sky is blue and why sunsets are red."),
)
