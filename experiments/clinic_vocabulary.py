"""The vocabulary of the fictional clinic notes says what a note can say, never how often."""

from __future__ import annotations

from typing import NamedTuple


class Condition(NamedTuple):
    """A `Condition` holds what its notes may mention; each entry of a tuple fits all others."""

    complaint: tuple[str, ...]
    finding: tuple[str, ...]
    drug: tuple[str, ...]
    test: tuple[str, ...]


SYSTEMS: dict[str, dict[str, Condition]] = {
    "skin": {
        "scabies": Condition(
            ("night itching of the hands", "an itchy rash at the wrists", "itching in bed"),
            (
                "burrows between the fingers",
                "scratch marks on both wrists",
                "mite tracks at the waist",
            ),
            ("permethrin cream", "ivermectin tablets", "benzyl benzoate lotion"),
            ("skin scraping", "dermatoscope view"),
        ),
        "eczema": Condition(
            ("dry red elbows", "a flaky rash behind the knees", "sore cracked hands"),
            ("scaling at both elbows", "thickened skin folds", "weeping patches on the palms"),
            ("hydrocortisone ointment", "emollient wash", "tacrolimus ointment"),
            ("patch test", "skin swab"),
        ),
        "cellulitis": Condition(
            ("a hot swollen shin", "spreading redness of the leg", "a painful red foot"),
            (
                "warm redness to the knee",
                "shiny tight skin over the shin",
                "a small wound at the heel",
            ),
            ("flucloxacillin", "clindamycin", "cefalexin"),
            ("blood culture", "wound swab"),
        ),
        "hives": Condition(
            ("raised itchy weals", "blotches that come and go", "a sudden itchy flush"),
            ("pale weals on the trunk", "swollen eyelids", "red blotches on the neck"),
            ("cetirizine", "loratadine", "prednisolone"),
            ("allergy panel", "tryptase level"),
        ),
    },
    "heart": {
        "angina": Condition(
            ("tightness on the stairs", "chest pressure on walking", "jaw ache with effort"),
            ("a regular pulse and clear lungs", "a soft murmur at the apex", "cool hands"),
            ("nitrate spray", "bisoprolol", "amlodipine"),
            ("exercise test", "heart tracing"),
        ),
        "palpitations": Condition(
            ("a racing heartbeat", "fluttering at rest", "missed beats at night"),
            ("an irregular pulse", "a fast regular pulse", "extra beats on listening"),
            ("apixaban", "metoprolol", "flecainide"),
            ("day-long tracing", "thyroid level"),
        ),
        "device": Condition(
            (
                "beeping from the pacemaker",
                "twitching over the pacemaker",
                "a recalled pacemaker lead",
            ),
            ("noise on the lead", "a healed pocket scar", "a rising lead resistance"),
            ("cefazolin cover", "paracetamol", "lidocaine patch"),
            ("device check", "chest film of the lead"),
        ),
        "failure": Condition(
            ("swollen ankles", "waking up breathless", "rapid weight gain"),
            ("crackles at both bases", "pitting at the shins", "raised neck veins"),
            ("furosemide", "spironolactone", "ramipril"),
            ("echo scan", "kidney blood test"),
        ),
    },
    "chest": {
        "asthma": Condition(
            ("wheeze at night", "tight breathing in cold air", "a dry cough after running"),
            ("wheeze on both sides", "a long breath out", "good air entry after the spacer"),
            ("salbutamol inhaler", "budesonide inhaler", "montelukast"),
            ("peak flow", "breath test"),
        ),
        "pneumonia": Condition(
            ("fever with rusty phlegm", "shaking chills and cough", "sharp pain on breathing in"),
            ("dullness at the right base", "coarse crackles on the left", "a fast shallow breath"),
            ("amoxicillin", "doxycycline", "clarithromycin"),
            ("chest film", "sputum culture"),
        ),
        "smoker's lung": Condition(
            ("a long-standing morning cough", "more breathless than usual", "thick green phlegm"),
            ("a barrel-shaped chest", "quiet breath sounds", "pursed-lip breathing"),
            ("tiotropium inhaler", "carbocisteine", "azithromycin"),
            ("spirometry", "oxygen reading"),
        ),
        "blood clot": Condition(
            (
                "sudden breathlessness",
                "a stabbing pain at the ribs",
                "coughing up streaks of blood",
            ),
            ("a tender calf", "a rub on the right side", "low oxygen at rest"),
            ("rivaroxaban", "heparin", "warfarin"),
            ("clot marker", "lung scan"),
        ),
    },
    "stomach": {
        "reflux": Condition(
            ("burning behind the breastbone", "sour taste in the morning", "belching after meals"),
            ("a soft belly", "mild upper tenderness", "worn teeth"),
            ("omeprazole", "alginate syrup", "famotidine"),
            ("breath urea test", "endoscopy"),
        ),
        "gallstones": Condition(
            ("cramps after fatty food", "pain under the right ribs", "dark urine and itching"),
            ("a catch on breathing in", "yellow eyes", "fullness under the ribs"),
            ("diclofenac", "hyoscine", "ursodiol"),
            ("belly scan", "liver blood test"),
        ),
        "gut infection": Condition(
            ("watery stools", "vomiting since breakfast", "cramps and loose stools"),
            ("a dry tongue", "gurgling bowel sounds", "sunken eyes"),
            ("rehydration salts", "loperamide", "ondansetron"),
            ("stool culture", "salt level"),
        ),
        "appendix": Condition(
            ("pain moving to the right groin", "no appetite and belly pain", "pain on every step"),
            ("guarding low on the right", "rebound pain", "a tense lower belly"),
            ("metronidazole", "cefuroxime", "morphine"),
            ("urgent scan", "white cell count"),
        ),
    },
    "joint": {
        "gout": Condition(
            (
                "a throbbing big toe",
                "a burning ankle after a feast",
                "a toe that hates the blanket",
            ),
            ("a purple swollen toe", "chalky lumps at the ear", "heat over the big toe"),
            ("colchicine", "allopurinol", "naproxen"),
            ("uric acid", "joint fluid"),
        ),
        "worn knee": Condition(
            ("a stiff knee in the morning", "grinding on the stairs", "a knee that gives way"),
            ("a bony knee edge", "thin thigh muscle", "a small cool swelling"),
            ("ibuprofen gel", "celecoxib", "capsaicin cream"),
            ("knee film", "gait check"),
        ),
        "infected joint": Condition(
            ("a hot knee and fever", "a hip too sore to move", "a swollen elbow with chills"),
            ("a tense hot swelling", "no movement without pain", "pus at an old scar"),
            ("vancomycin", "ceftriaxone", "teicoplanin"),
            ("needle sample", "infection marker"),
        ),
        "sprain": Condition(
            ("a twisted ankle", "a wrist bent in a fall", "a popping shoulder"),
            ("bruising below the ankle", "a tender wrist edge", "full strength with pain"),
            ("ice and codeine", "strapping", "ketoprofen gel"),
            ("ankle film", "stress view"),
        ),
    },
    "head": {
        "migraine": Condition(
            ("one-sided pounding pain", "zigzag lights before pain", "headache with nausea"),
            ("normal pupils", "dislike of the lamp", "a tender temple"),
            ("sumatriptan", "propranolol", "aspirin powder"),
            ("headache diary", "eye check"),
        ),
        "dizziness": Condition(
            ("a spinning room on turning", "unsteady walking", "ringing with dizziness"),
            ("flicking eyes on turning", "a sway with eyes closed", "a dull left ear"),
            ("betahistine", "cinnarizine", "prochlorperazine"),
            ("head-turn test", "hearing test"),
        ),
        "concussion": Condition(
            ("a blow to the head", "foggy thinking after a fall", "vomiting after a knock"),
            ("a graze on the brow", "slow answers", "a bruise behind the ear"),
            ("rest and fluids", "metoclopramide", "tranexamic acid"),
            ("head scan", "memory test"),
        ),
        "stroke": Condition(
            ("a drooping face", "slurred words", "a weak right arm"),
            ("a drift of the arm", "uneven smile", "loss of the left field"),
            ("clopidogrel", "alteplase", "aspirin"),
            ("artery scan", "swallow test"),
        ),
    },
}

ROUTES = (
    "Walk-in", "Home visit", "Phone call", "Ambulance arrival", "Pharmacy referral", "Booked visit",
)  # fmt: skip
TRIGGERS = (
    "after a stay at the riverside care home", "since a tablet was changed",
    "following a recall letter", "after a long flight", "with a cold in the family",
    "after heavy lifting", "during a heat wave", "without a clear trigger",
)  # fmt: skip
PLANS = (
    "Admitted to the ward.", "Seen by the specialist today.", "Isolated and contacts traced.",
    "Sent home with a leaflet.", "Nurse review in two weeks.", "Group class every Tuesday.",
    "Telephone check tomorrow.", "Discharged to the family doctor.",
)  # fmt: skip
SEASONS = ("January", "March", "May", "July", "September", "November")
DURATIONS = (
    "two hours", "one day", "three days", "one week", "ten days", "one month", "six months",
    "years",
)  # fmt: skip
DOSES = ("once daily", "twice daily", "at night", "with meals", "when needed", "with water")
HISTORIES = (
    "high blood pressure", "diabetes", "kidney disease", "a past stroke", "no illness of note",
    "penicillin allergy", "low mood", "a hip replacement", "thyroid disease", "a past ulcer",
)  # fmt: skip
ADVICE = (
    "wash all bedding hot", "keep the leg raised", "stop smoking", "drink more water",
    "carry the device card", "rest at home", "come back if it worsens", "avoid driving",
    "walk every day", "eat lighter meals",
)  # fmt: skip
DECADES = ("20", "30", "40", "50", "60", "70", "80")
DETAILS = ("short", "medium", "long")
VOICES = ("narrative", "heading", "telegram")
